"""`replay` of a trace: a page with a slider, and a figure over time.

walk.py         replays the segments of a trace, with a callback for each step
timeline.py     a few numbers for each moment: for sparklines, the overview and the figure
moments.py      the engine's state at each moment, in a file, read back in bounded time
shown_trace.py  the data of the page: moments, added by a thread
page.py         the server of the page
plot.py         the figure
"""
