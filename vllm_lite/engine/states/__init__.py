"""States of recurrent layers: the slot in which each sequence goes on, and the saved states that others begin with."""
