"""The command-line tools: command line, benchmarks, chat, plan, doctor. No other package imports them."""
