"""One sequence across several ranks: how keys and values reach the queries that see them."""
