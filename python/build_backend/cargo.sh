#!/bin/sh
# The build calls this in place of cargo: $PARTYWALL_CARGO, which gets the arguments $PARTYWALL_BUILD whatever maturin
# wants compiled.
#
# maturin would compile partywall-python without the program. Cargo would then select other features of shared
# dependencies, and compile the library and everything below it a second time. The same command as before compiles
# nothing, and names the extension to maturin.
if [ "$1" != rustc ]; then
    exec "$PARTYWALL_CARGO" "$@"
fi
# With the variables of maturin, PyO3 would be compiled again. The extension is for every Python from 3.11 on.
for variable in $(env | sed -n 's/^\(PYO3_[A-Z_]*\)=.*/\1/p'); do
    unset "$variable"
done
# shellcheck disable=SC2086 # several words
exec "$PARTYWALL_CARGO" $PARTYWALL_BUILD --message-format=json-render-diagnostics
