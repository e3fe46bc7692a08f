"""Who holds and exchanges what, as numbers: ranks, groups, stages, parameters, shards. No torch."""
