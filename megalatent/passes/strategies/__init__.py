"""How plans are found: each strategy is a module, `search` tries them and picks the best."""
