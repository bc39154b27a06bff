  // Of latent_decode: a token is a latent of DV elements and, in the other pool, D - DV that positions are in. A key is both,
  // one after the other, and the value is the latent: packets of a lane's keys that it has loaded already.
  if (kv_head == 0 && fresh >= lo && fresh < hi) {
    const int64_t at = static_cast<int64_t>(tables[sequence * max_blocks + fresh / BS]) * BS + fresh % BS;
    for (int dim = sg * 32 + lane; dim < DV; dim += SG * 32) {
      const_cast<device T*>(k_pool)[at * DV + dim] = k_new[static_cast<int64_t>(row) * DV + dim];
    }
    for (int dim = sg * 32 + lane; dim < D - DV; dim += SG * 32) {
      const_cast<device T*>(v_pool)[at * (D - DV) + dim] = v_new[static_cast<int64_t>(row) * (D - DV) + dim];
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
    UNROLL
    for (int u = 0; u < U; u++) {
      // A token outside [lo, hi) is replaced by the nearest one inside (its score is dropped below), so that every
      // address is of a live token.
      const int token = chunk * CHUNK + u * TPS;
      const int position = metal::min(metal::max(token + step_token, lo), hi - 1);
      const int64_t slot = static_cast<int64_t>(blocks[u * TPS / BS]) * BS + position % BS;
      auto latent = position == fresh ? k_new + static_cast<int64_t>(row) * DV : k_pool + slot * DV;
      auto rotated = position == fresh ? v_new + static_cast<int64_t>(row) * (D - DV) : v_pool + slot * (D - DV);
      UNROLL
      for (int i = 0; i < NK; i++) {
        const int dim = (i * LPT + sub) * VEC;
        keys[u * NK + i] = dim < DV ? load_packet<T, VEC>(latent + dim) : dim < D ? load_packet<T, VEC>(rotated + (dim - DV)) : zero_packet<T, VEC>();
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
