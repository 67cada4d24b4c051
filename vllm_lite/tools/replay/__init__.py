"""`replay` of a trace as it can be looked at: a page with a slider, and a figure over time.

walk.py         replays the segments of a trace, and reports each step that was made
timeline.py     a few numbers of each moment: for sparklines, the overview and the figure
moments.py      the engine as it was at each moment, in a file, read back in bounded time
shown_trace.py  what the page shows: moments made by a thread, read by others
page.py         the server of the page
plot.py         the figure
"""
