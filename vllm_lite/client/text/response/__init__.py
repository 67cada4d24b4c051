"""What a model wrote, taken apart while it arrives: reasoning, content and tool calls.

pieces.py     what goes in and what comes out: Piece, Delta, CallDelta
parser.py     ResponseParser: one pass over the pieces of one output
"""
