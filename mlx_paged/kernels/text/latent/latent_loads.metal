    // A lane's packets of a token: those of its key, of which the first are its value.
    constexpr int PACKETS = NK;
    constexpr int VALUE = 0;
    Packet<T, VEC> packets[U * PACKETS];
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
        packets[u * PACKETS + i] = dim < DV ? load_packet<T, VEC>(latent + dim) : dim < D ? load_packet<T, VEC>(rotated + (dim - DV)) : zero_packet<T, VEC>();
      }
    }
    look_up_blocks<CHUNK, BS, BLOCKS>(table, chunk + STRIPES, lo, hi, blocks);

