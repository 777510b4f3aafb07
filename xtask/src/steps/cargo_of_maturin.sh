#!/bin/sh
# maturin calls this in place of cargo where the workspace has been compiled already, by $PARTYWALL_CARGO with the
# arguments $PARTYWALL_BUILD.
#
# maturin compiles partywall-python alone. Cargo then selects other features of shared dependencies than for the whole
# workspace, and compiles the library and everything below it a second time. The same command as before compiles nothing,
# and names the extension to maturin.
if [ "$1" != rustc ]; then
    exec "$PARTYWALL_CARGO" "$@"
fi
# With the variables of maturin, PyO3 would be compiled again. The extension is for every Python from 3.11 on.
for variable in $(env | sed -n 's/^\(PYO3_[A-Z_]*\)=.*/\1/p'); do
    unset "$variable"
done
# shellcheck disable=SC2086 # several words
exec "$PARTYWALL_CARGO" $PARTYWALL_BUILD --message-format=json-render-diagnostics
