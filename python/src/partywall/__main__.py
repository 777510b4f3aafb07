"""`python -m partywall` is the `partywall` program."""

from partywall._program import main

main()
