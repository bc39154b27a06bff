  if (fresh >= lo && fresh < hi) {
    const int64_t at = (static_cast<int64_t>(tables[sequence * max_blocks + fresh / BS]) * n_kv + kv_head) * BS + fresh % BS;
    for (int dim = sg * 32 + lane; dim < D; dim += SG * 32) {
      const_cast<device T*>(k_pool)[at * D + dim] = k_new[fresh_row * D + dim];
    }
    for (int dim = sg * 32 + lane; dim < DV; dim += SG * 32) {
      const_cast<device T*>(v_pool)[at * DV + dim] = v_new[fresh_row * DV + dim];
    }
  }

  const int first_chunk = lo / CHUNK;
  const int last_chunk = (hi - 1) / CHUNK;
  const int table = sequence * max_blocks;
  int chunk = first_chunk + (stripe + STRIPES - first_chunk % STRIPES) % STRIPES;
  // The ids of a chunk's blocks are read one chunk ahead. Outside of what is visible, the nearest one inside is taken.
  int blocks[BLOCKS];
  UNROLL
  for (int i = 0; i < BLOCKS; i++) {
    blocks[i] = tables[table + metal::min(metal::max(chunk * CHUNK / BS + i, lo / BS), (hi - 1) / BS)];
  }
  for (; chunk <= last_chunk; chunk += STRIPES) {
    Packet<T, VEC> keys[U * NK];
    Packet<T, VEC> values[U * NV];
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
        keys[u * NK + i] = dim < D ? load_packet<T, VEC>(key + dim) : zero_packet<T, VEC>();
      }
      UNROLL
      for (int i = 0; i < NV; i++) {
        const int dim = (i * LPT + sub) * VEC;
        values[u * NV + i] = dim < DV ? load_packet<T, VEC>(value + dim) : zero_packet<T, VEC>();
      }
    }
    UNROLL
    for (int i = 0; i < BLOCKS; i++) {
      blocks[i] = tables[table + metal::min(metal::max((chunk + STRIPES) * CHUNK / BS + i, lo / BS), (hi - 1) / BS)];
    }

    float score[NS];
    UNROLL
    for (int u = 0; u < U; u++) {
      UNROLL
      for (int h = 0; h < HP; h++) {
        score[u * HP + h] = 0.0f;
      }
      UNROLL
      for (int i = 0; i < NK * VEC; i++) {
        const float key = packet_value<T, VEC>(keys[u * NK + i / VEC], i % VEC);
        UNROLL
        for (int h = 0; h < HG; h++) {
          score[u * HP + h] = metal::fma(query[h * NK * VEC + i], key, score[u * HP + h]);
        }
      }
    }
