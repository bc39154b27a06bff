    uint keys[U * NK * KW];
    uint values[U * NV * VW];
    T key_scale[U * NK];
    T key_bias[U * NK];
    T value_scale[U * NV];
    T value_bias[U * NV];
    UNROLL
    for (int u = 0; u < U; u++) {
      // A token outside [lo, hi) is replaced by the nearest one inside (its score is dropped below), so that every
      // address is of a live token. So is a packet past the end of a row, by the first one: its query is 0.
      const int token = chunk * CHUNK + u * TPS;
      const int64_t page = static_cast<int64_t>(blocks[u * TPS / BS]) * n_kv + kv_head;
      const int inside = metal::min(metal::max(token + step_token, lo), hi - 1) % BS;
      auto key_page = k_pages + page * K_PAGE;
      auto value_page = v_pages + page * V_PAGE;
      auto key_factors = reinterpret_cast<const device T*>(key_page + BS * K_CODES) + inside * 2 * K_GROUPS;
      auto value_factors = reinterpret_cast<const device T*>(value_page + BS * V_CODES) + inside * 2 * V_GROUPS;
      UNROLL
      for (int i = 0; i < NK; i++) {
        const int dim = (i * LPT + sub) * VEC < D ? (i * LPT + sub) * VEC : 0;
        load_words<KW>(key_page + inside * K_CODES + dim / VEC * KW, keys + (u * NK + i) * KW);
        key_scale[u * NK + i] = key_factors[dim / GS];
        key_bias[u * NK + i] = key_factors[K_GROUPS + dim / GS];
      }
      UNROLL
      for (int i = 0; i < NV; i++) {
        const int dim = (i * LPT + sub) * VEC < DV ? (i * LPT + sub) * VEC : 0;
        load_words<VW>(value_page + inside * V_CODES + dim / VEC * VW, values + (u * NV + i) * VW);
        value_scale[u * NV + i] = value_factors[dim / GS];
        value_bias[u * NV + i] = value_factors[V_GROUPS + dim / GS];
      }
    }
    look_up_blocks<CHUNK, BS, BLOCKS>(table, chunk + STRIPES, lo, hi, blocks);

