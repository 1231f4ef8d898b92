"""The configuration: its keys, how it is composed and checked, and what may change when a run is resumed."""
