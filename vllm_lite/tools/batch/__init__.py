"""`run-batch`: a file of requests in, a file of answers out, with a journal beside it. No torch.

rows.py           one request or bad row of the input, and its line of the output
line_bits.py      one bit for each line of an input; which lines repeat a custom_id
batch_source.py   a source of rows, and what is known of it before they are sent
jsonl_file.py     OpenAI's batch files, read line by line
row_mapper.py     a row of a table as a request
parquet_file.py   Parquet in and out
hub_dataset.py    data sets of the hub, or of a folder, read with the library `datasets`
batch_input.py    which of these an --input-file names
prefix_order.py   rows of a window in the order in which they share most of their prompts
journal.py        records of what is answered, and where in the output
batch_results.py  the output and its journal: appended to, resumed, finished
fingerprint.py    settings that change answers, as digests
batch_run.py      many requests at once, from a source into the results
batch_report.py   counts of tokens, hits, time and failures; progress with the time left
"""
