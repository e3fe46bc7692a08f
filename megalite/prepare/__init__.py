"""Makes token files of text, in one pipeline:

source (sources.py: the names in data.path become files, and files become shards, parts of one size)
-> texts (reading.py: the documents of a shard, in pieces; hub.py: data sets and tokenizers by name)
-> ids (tokenizing.py: a token file of each shard, by worker processes, visible only when it is whole)
-> join (prepare.py: the shards' token files become one, under a name that says what they are made of).

A kill anywhere costs the shards that were being written, and nothing else.
"""
