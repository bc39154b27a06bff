// Of latent_prefill_tensor: how a step's keys and values come.
// Dead tokens are zeros: their slots may hold anything, and a weight of zero does not make a NaN go away.
auto load = [&](auto width, auto from, auto padded, const T* source, T* target, int step, int ids) {
  constexpr int DIM = decltype(width)::value;
  constexpr int CHUNKS = DIM / 8;
  constexpr bool EVEN = THREADS % CHUNKS == 0;  // then a thread's addresses differ by constants
  UNROLL
  for (int i = 0; i < KEYS * CHUNKS; i += THREADS) {
    const int item = i + thread_index;
    const int token = EVEN ? i / CHUNKS + thread_index / CHUNKS : item / CHUNKS;
    const int chunk = EVEN ? thread_index % CHUNKS : item % CHUNKS;
    const int slot = KEYS < BS ? step * KEYS % BS + token : token % BS;
    const int id = BLOCKS == 1 ? ids : simd_shuffle(ids, static_cast<ushort>(token / BS % BLOCKS));
    const bool live = static_cast<uint>(step * KEYS + token - lo) < static_cast<uint>(hi - lo);
    if (KEYS * CHUNKS % THREADS == 0 || item < KEYS * CHUNKS) {
      T* const place = target + token * decltype(padded)::value + decltype(from)::value + chunk * 8;
      copies.copy(place, source + (static_cast<int64_t>(id) * BS + slot) * DIM + chunk * 8, live);
    }
  }
};
auto load_keys = [&](int step, int ids) {
  T* const stage = shared + (step - first) % BUFFERS * STAGE;
  load(Number<D - DR>(), Number<0>(), Number<KW>(), k_head, stage, step, ids);
  load(Number<DR>(), Number<D - DR>(), Number<KW>(), rotated, stage, step, ids);
};
auto load_values = [&](int step, int ids) {
  load(Number<DV>(), Number<0>(), Number<VW>(), v_head, shared + (step - first) % BUFFERS * STAGE + KEYS * KW, step, ids);
};
