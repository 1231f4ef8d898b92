"""The configuration: its keys, its composition and checks, and the keys that a resumed run may change."""
