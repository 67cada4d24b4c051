"""States of recurrent layers: the slot of each running sequence, and saved states from which other sequences start."""
