  const int first_chunk = lo / CHUNK;
  const int last_chunk = (hi - 1) / CHUNK;
  const auto table = tables + sequence * max_blocks;
  int chunk = first_chunk + (stripe + STRIPES - first_chunk % STRIPES) % STRIPES;
  // Blocks are looked up one chunk ahead.
  int blocks[BLOCKS];
  look_up_blocks<CHUNK, BS, BLOCKS>(table, chunk, lo, hi, blocks);
  for (; chunk <= last_chunk; chunk += STRIPES) {
