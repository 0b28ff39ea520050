"""The trainers set a switch here."""

_supports_onednn = False
