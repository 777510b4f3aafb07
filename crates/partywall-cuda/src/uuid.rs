//! The UUID of a GPU: an identity that is the same in every process.

use std::fmt;
use std::str::FromStr;

/// The UUID of a device, as `cuDeviceGetUuid` version 2 returns it. For a MIG instance it is the UUID of the instance.
///
/// The ordinal of a device depends on `CUDA_VISIBLE_DEVICES` and on the process; the UUID does not. It is formatted as
/// in `nvidia-smi -L`: `GPU-2b6a1c34-…`. It is parsed in that form, in the same form with `MIG-`, and as a bare UUID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceUuid(pub [u8; 16]);

/// The error that a text is not the UUID of a device.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a device UUID: expected GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx in hexadecimal")]
pub struct ParseUuidError {
    /// The text that was given.
    pub text: String,
}

/// As `Display`, for a `main` that returns the error.
impl fmt::Debug for ParseUuidError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = format!("{:032x}", u128::from_be_bytes(self.0));
        write!(f, "GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for DeviceUuid {
    type Err = ParseUuidError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| ParseUuidError { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<DeviceUuid> {
    let bare = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-")).unwrap_or(text);
    let mut groups = bare.split('-');
    // Only digits are accepted: `from_str_radix` would also accept a sign.
    let mut fits = |length| {
        let group = groups.next()?.as_bytes();
        (group.len() == length && group.iter().all(u8::is_ascii_hexdigit)).then_some(())
    };
    DIGITS.into_iter().try_for_each(&mut fits)?;
    groups.next().is_none().then_some(())?;
    let number = u128::from_str_radix(&bare.replace('-', ""), 16).ok()?;
    Some(DeviceUuid(number.to_be_bytes()))
}

/// The number of digits in each group.
const DIGITS: [usize; 5] = [8, 4, 4, 4, 12];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";
    const BYTES: [u8; 16] =
        [0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff];

    #[test]
    fn prints_like_nvidia_smi() {
        assert_eq!(DeviceUuid(BYTES).to_string(), TEXT);
    }

    #[test]
    fn parses_every_usual_form() {
        for text in [
            TEXT,
            "MIG-00112233-4455-6677-8899-aabbccddeeff",
            "00112233-4455-6677-8899-aabbccddeeff",
            "GPU-00112233-4455-6677-8899-AABBCCDDEEFF",
        ] {
            assert_eq!(text.parse(), Ok(DeviceUuid(BYTES)), "{text}");
        }
    }

    #[test]
    fn refuses_everything_else() {
        for text in [
            "",
            "GPU-",
            "GPU-0",
            "gpu-00112233-4455-6677-8899-aabbccddeeff",
            "GPU-0011223344556677-8899-aabbccddeeff",
            "GPU-00112233-4455-6677-8899-aabbccddeeff-",
            "GPU-00112233-4455-6677-8899-aabbccddeef",
            "GPU-00112233-4455-6677-8899-aabbccddeefg",
            "GPU-00112233-4455-6677-8899-aabbccddee\u{e9}",
            "GPU-+0112233-4455-6677-8899-aabbccddeeff",
        ] {
            let error = text.parse::<DeviceUuid>().unwrap_err();
            assert_eq!(error.text, text);
        }
    }

    proptest! {
        #[test]
        fn text_and_bytes_round_trip(bytes: [u8; 16]) {
            let uuid = DeviceUuid(bytes);
            prop_assert_eq!(uuid.to_string().parse(), Ok(uuid));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text: String) {
            let _ = text.parse::<DeviceUuid>();
        }
    }
}
