// Of quantized_prefill_tensor: keys and values are those that mx.dequantize makes of a page's codes, and lie in shared memory as
// the dense kernel's do. A step's codes come there first, asynchronously, each thread's for itself; once they are there it
// makes values of them, 16 or 32 codes of a token at a time, all of one group.
constexpr int K_ROW = D / 32 * KBITS + D / GS;   // words
constexpr int V_ROW = DV / 32 * VBITS + DV / GS;
constexpr int K_ITEMS = (KEYS * D / 128 * KBITS + THREADS - 1) / THREADS;   // loads of 16 bytes of a thread
constexpr int V_ITEMS = (KEYS * DV / 128 * VBITS + THREADS - 1) / THREADS;
constexpr int ITEMS = K_ITEMS > V_ITEMS ? K_ITEMS : V_ITEMS;
__shared__ __align__(16) uint raw[ITEMS * THREADS * 4];
__shared__ uint scales[ITEMS * THREADS], biases[ITEMS * THREADS];  // words that have a load's scale or bias
const uint* k_head = k_pool + static_cast<int64_t>(kv_head) * (BS * K_ROW);
const uint* v_head = v_pool + static_cast<int64_t>(kv_head) * (BS * V_ROW);
bool is_value = false;  // what has been begun last
// Which token and load of its row: eight lanes in a row take eight tokens, and store into different banks.
auto token_of = [&](int i, int loads) {
  return (i * (THREADS / 8) + thread_index / 8) / loads * 8 + thread_index % 8;
};
auto load_of = [&](int i, int loads) { return (i * (THREADS / 8) + thread_index / 8) % loads; };
auto dequantize = [&](auto width, auto bits, T* target) {
  constexpr int DIM = decltype(width)::value, BITS = decltype(bits)::value;
  constexpr int LOADS = DIM * BITS / 128, CODES = 128 / BITS;
  UNROLL
  for (int i = 0; i * THREADS < KEYS * LOADS; i++) {
    if (KEYS * LOADS % THREADS == 0 || i * THREADS + thread_index < KEYS * LOADS) {
      const int g = load_of(i, LOADS) * CODES / GS;
      const uint scale = both_halves(scales[i * THREADS + thread_index], g % 2);
      const uint bias = both_halves(biases[i * THREADS + thread_index], (DIM / GS + g) % 2);
      T* const row = target + token_of(i, LOADS) * (DIM + 8) + load_of(i, LOADS) * CODES;
      const uint4 codes = load_aligned(raw + (i * THREADS + thread_index) * 4);
      UNROLL
      for (int j = 0; j < CODES / 8; j++) {
        const uint words[2] = {word(codes, j * BITS / 4), word(codes, j * BITS / 4 + BITS / 8)};
        uint pairs[4];
        value_pairs<T, BITS>(words, scale, bias, pairs);
        store_words(row + j * 8, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      }
    }
  }
};
auto copies = then([&] {
  if (is_value) {
    dequantize(Number<DV>(), Number<VBITS>(), shared + KEYS * KW);
  } else {
    dequantize(Number<D>(), Number<KBITS>(), shared);
  }
});
