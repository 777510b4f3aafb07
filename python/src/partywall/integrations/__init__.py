"""Partywall in other libraries. Each module here imports its library; this package imports none."""
