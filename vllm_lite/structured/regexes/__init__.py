"""Regular expressions as trees and automata, to rewrite look-around that llguidance does not support."""
