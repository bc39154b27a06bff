    // A lane's packets of a token: those of its key, then those of its value.
    constexpr int PACKETS = NK + NV;
    constexpr int VALUE = NK;
    Packet<T, VEC> packets[U * PACKETS];
    UNROLL
    for (int u = 0; u < U; u++) {
      // A token outside [lo, hi) is replaced by the nearest one inside (its score is dropped below), so that every
      // address is of a live token.
      const int token = chunk * CHUNK + u * TPS;
      const int64_t base = (static_cast<int64_t>(blocks[u * TPS / BS]) * n_kv + kv_head) * BS;
      const int position = metal::min(metal::max(token + step_token, lo), hi - 1);
      const int inside = position % BS;
      auto key = position == fresh ? k_new + fresh_row * D : k_pool + base * D + inside * D;
      auto value = position == fresh ? v_new + fresh_row * DV : v_pool + base * DV + inside * DV;
      UNROLL
      for (int i = 0; i < NK; i++) {
        const int dim = (i * LPT + sub) * VEC;
        packets[u * PACKETS + i] = dim < D ? load_packet<T, VEC>(key + dim) : zero_packet<T, VEC>();
      }
      UNROLL
      for (int i = 0; i < NV; i++) {
        const int dim = (i * LPT + sub) * VEC;
        packets[u * PACKETS + VALUE + i] = dim < DV ? load_packet<T, VEC>(value + dim) : zero_packet<T, VEC>();
      }
    }
    look_up_blocks<CHUNK, BS, BLOCKS>(table, chunk + STRIPES, lo, hi, blocks);

