"""The trainers set a switch here."""
