"""Makes token files of text: sources -> shards -> pieces of documents -> a token file of each shard -> one of all."""
