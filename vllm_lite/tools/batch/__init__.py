"""`run-batch`: answers a file of requests into a file, with a journal beside it. No torch.

rows.py           requests and bad rows of the input, and their lines of the output
line_bits.py      a bit set of lines; lines with a repeated custom_id
batch_source.py   BatchSource: the interface of inputs, and a survey of one before its rows are sent
jsonl_file.py     OpenAI's batch files, read line by line
row_mapper.py     requests from the rows of a table
parquet_file.py   Parquet input and output
hub_dataset.py    data sets of the hub, or of a folder, read with the library `datasets`
batch_input.py    the source for an --input-file
prefix_order.py   sorts the rows of a window by prompt, so that shared prefixes are cached
journal.py        records of the answered rows, and of their lines in the output
batch_results.py  the output and its journal: append, resume, finish
fingerprint.py    digests of the settings that change answers
batch_run.py      sends rows concurrently and stores the answers
batch_report.py   counts of tokens, hits, time and failures; progress with the time left
"""
