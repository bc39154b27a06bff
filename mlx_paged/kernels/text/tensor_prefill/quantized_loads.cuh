// Of quantized_prefill_tensor: how a step's codes come. Dead tokens have scales and biases of zero: their slots may hold anything,
// and a weight of zero does not make a NaN go away.
auto load = [&](auto width, auto bits, const uint* head, int step, int ids) {
  constexpr int DIM = decltype(width)::value, BITS = decltype(bits)::value;
  constexpr int LOADS = DIM * BITS / 128, WORDS = DIM * BITS / 32, ROW_GROUPS = DIM / GS;
  const int stride = n_kv * (BS * (WORDS + ROW_GROUPS));  // of a block
  UNROLL
  for (int i = 0; i * THREADS < KEYS * LOADS; i++) {
    const int token = token_of(i, LOADS), at = load_of(i, LOADS);
    const int slot = KEYS < BS ? step * KEYS % BS + token : token % BS;
    const int id = BLOCKS == 1 ? ids : simd_shuffle(ids, static_cast<ushort>(token / BS % BLOCKS));
    if (KEYS * LOADS % THREADS == 0 || i * THREADS + thread_index < KEYS * LOADS) {
      const bool live = static_cast<uint>(step * KEYS + token - lo) < static_cast<uint>(hi - lo);
      const uint* page = head + static_cast<int64_t>(id) * stride;
      const uint* factors = page + BS * WORDS + slot * ROW_GROUPS;
      const int g = at * 128 / BITS / GS;
      copies.copy(raw + (i * THREADS + thread_index) * 4, page + slot * WORDS + at * 4, live);
      copies.copy_word(scales + i * THREADS + thread_index, factors + g / 2, live);
      copies.copy_word(biases + i * THREADS + thread_index, factors + (ROW_GROUPS + g) / 2, live);
    }
  }
};
auto load_keys = [&](int step, int ids) {
  is_value = false;
  load(Number<D>(), Number<KBITS>(), k_head, step, ids);
};
auto load_values = [&](int step, int ids) {
  is_value = true;
  load(Number<DV>(), Number<VBITS>(), v_head, step, ids);
};
