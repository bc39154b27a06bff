"""Keys and values: blocks, block tables, layer groups, the pool and its memory budget."""
