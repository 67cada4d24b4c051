"""Regular expressions as trees and automata: those with look-around become others without it."""
