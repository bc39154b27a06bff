"""Where keys and values live: blocks, block tables, layer groups, the pool and its memory budget."""
