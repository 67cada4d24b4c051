"""Parses a model's output while it arrives: reasoning, content and tool calls.

template.py        a format as data: fields and the literals and patterns between which they stand
marks.py           added tokens as single characters, so that text that spells one is not one
parser.py          ResponseParser: one pass over the pieces of one output; calls at the end of unclosed reasoning
scan.py            the search for delimiters in text that is still arriving, and in the prompt before it
events.py          pieces of an output in, events of its message out: one for each run of a kind
calls.py           what readers of calls share, and the reader of calls that make sense only as a whole
json_value.py      one JSON value, checked while it arrives
json_calls.py      calls as JSON
tagged_calls.py    calls as tags around keys and values
pythonic_calls.py  calls as Python
element_calls.py   calls as elements within elements
readers.py         which reader reads the calls of a field
contents.py        kinds of content: what a complete text means
arguments.py       the arguments of a call, once they are complete
shipped.py         the formats that come with this package, formats/*.json
choose.py          which format a model writes, and how its thinking begins and ends
"""
