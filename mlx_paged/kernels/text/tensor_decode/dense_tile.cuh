// Of paged_decode_tensor: a warp's chunks, from queries, keys and values to the accumulators of a partition.
// The head's sink enters here.
auto finish = [&](int head, int at, State whole, float4 o) {
  if (SINKS) join({static_cast<float>(sinks[kv_head * G + head]) * LOG2E, 1.0f}, make_float4(0.0f, 0.0f, 0.0f, 0.0f), whole, o);
  const float values[4] = {o.x, o.y, o.z, o.w};
  UNROLL
  for (int i = 0; i < 4; i++) {
    const int place = at * 4 + i;
    out[(line0 + head * q_len) * DV + place % (DV / 8) * 8 + place / (DV / 8)] = static_cast<T>(values[i] / whole.l);
  }
};

if (first <= last) {
  const int* table = tables + sequence * max_blocks;
  const float gain = SOFTCAP ? params[0] / params[1] : params[0] * LOG2E;
  uint query[NT][KT][4];  // column (head) r, dims 32 * kt + 8c + 0..7
  UNROLL
  for (int n = 0; n < NT; n++) {
    UNROLL
    for (int kt = 0; kt < KT; kt++) {
      const int dim = kt * 32 + c * 8;
      const int head = n * 8 + r;
      uint4 bits = make_uint4(0, 0, 0, 0);
      if (head < G && dim < D) bits = *reinterpret_cast<const uint4*>(q + (line0 + head * q_len) * D + dim);
      query[n][kt][0] = bits.x;
      query[n][kt][1] = bits.y;
      query[n][kt][2] = bits.z;
      query[n][kt][3] = bits.w;
    }
  }
  float acc[NT][VT][4][4];
  float m[NT][2], l[NT][2];

  const int first_chunk = lo / CHUNK;
  const int last_chunk = (hi - 1) / CHUNK;
  const int first_block = lo / BS;
  const int last_block = (hi - 1) / BS;
  // Block ids of a chunk's 8-token halves, one look-up per block. Dead halves and dead tokens borrow the nearest live
  // one, so that every address is of a live token.
  auto look_up = [&](int chunk, int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 2; i++) {
      ids[i] = i == 0 || i * 8 % BS == 0 ? table[metal::min(metal::max((chunk * CHUNK + i * 8) / BS, first_block), last_block)] : ids[i - 1];
    }
  };
  auto slot = [&](int token) { return metal::min(metal::max(token, lo), hi - 1) % BS; };
  const T* k_head = k_pool + kv_head * (BS * D) + c * 8;
  const T* v_head = v_pool + kv_head * (BS * DV) + r * 8;
  uint4 keys[U][2][KT];    // tokens r of each half
  uint4 values[U][4][VT];  // tokens 2c, 2c + 1 of each half
  auto load_keys = [&](int chunk, const int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 2; i++) {
      const T* source = k_head + static_cast<int64_t>(ids[i]) * (n_kv * BS * D) + slot(chunk * CHUNK + i * 8 + r) * D;
      UNROLL
      for (int kt = 0; kt < KT; kt++) {
        keys[i / 2][i % 2][kt] = D % 32 == 0 || kt * 32 + c * 8 < D ? stream_load(source + kt * 32) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  auto load_values = [&](int chunk, const int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 4; i++) {
      const T* source = v_head + static_cast<int64_t>(ids[i / 2]) * (n_kv * BS * DV) + slot(chunk * CHUNK + i / 2 * 8 + c * 2 + i % 2) * DV;
      UNROLL
      for (int vt = 0; vt < VT; vt++) {
        values[i / 4][i % 4][vt] = DV % 64 == 0 || vt * 64 + r * 8 < DV ? stream_load(source + vt * 64) : make_uint4(0, 0, 0, 0);
      }
    }
  };

  // Software pipeline: the registers of a chunk's keys are refilled as soon as its scores are known, those of its
  // values at the end, so that loads are always in flight; block ids are fetched two chunks ahead.
  int ids[U * 2];
  if (fresh >= lo && fresh < hi && fresh / CHUNK % SG == warp) {
    // Stored by the warp that loads it again below.
    const int64_t at = (static_cast<int64_t>(table[fresh / BS]) * n_kv + kv_head) * BS + fresh % BS;
    for (int dim = lane * 8; dim < D; dim += 256) *reinterpret_cast<uint4*>(const_cast<T*>(k_pool) + at * D + dim) = *reinterpret_cast<const uint4*>(k_new + unit * D + dim);
    for (int dim = lane * 8; dim < DV; dim += 256) *reinterpret_cast<uint4*>(const_cast<T*>(v_pool) + at * DV + dim) = *reinterpret_cast<const uint4*>(v_new + unit * DV + dim);
    __syncwarp();
  }
  int chunk = first_chunk + (warp + SG - first_chunk % SG) % SG;
  if (chunk <= last_chunk) {
    look_up(chunk, ids);
    load_keys(chunk, ids);
    load_values(chunk, ids);
    look_up(chunk + SG, ids);
  }
  for (int part = 0; first + part <= last; part++) {
    UNROLL
    for (int n = 0; n < NT; n++) {
      UNROLL
      for (int i = 0; i < VT * 16; i++) acc[n][i / 16][i / 4 % 4][i % 4] = 0.0f;
      m[n][0] = m[n][1] = NOTHING;
      l[n][0] = l[n][1] = 0.0f;
    }
    const int part_end = metal::min(last_chunk, (origin + (first + part + 1) * size) / CHUNK - 1);
    for (; chunk <= part_end; chunk += SG) {
      const bool more = chunk + SG <= last_chunk;
      float scores[NT][U][4];  // (token r, heads 2c and 2c + 1), then token r + 8
      UNROLL
      for (int n = 0; n < NT; n++) {
        UNROLL
        for (int u = 0; u < U; u++) {
          UNROLL
          for (int i = 0; i < 4; i++) scores[n][u][i] = 0.0f;
          UNROLL
          for (int kt = 0; kt < KT; kt++) {
            const uint4 a = keys[u][0][kt];
            const uint4 b = keys[u][1][kt];
            mma<T>(scores[n][u], a.x, b.x, a.y, b.y, query[n][kt][0], query[n][kt][1]);
            mma<T>(scores[n][u], a.z, b.z, a.w, b.w, query[n][kt][2], query[n][kt][3]);
          }
        }
      }
      if (more) load_keys(chunk + SG, ids);

      UNROLL
      for (int n = 0; n < NT; n++) {
        auto& score = scores[n];
        float top[2] = {m[n][0], m[n][1]};
        UNROLL
        for (int u = 0; u < U; u++) {
          UNROLL
          for (int i = 0; i < 4; i++) {
            const int token = chunk * CHUNK + u * 16 + i / 2 * 8 + r;
            float s = score[u][i] * gain;
            if (SOFTCAP) s = ::tanhf(s) * (params[1] * LOG2E);
            score[u][i] = token >= lo && token < hi ? s : NOTHING;
            top[i % 2] = ::fmaxf(top[i % 2], score[u][i]);
          }
        }
        float shrink[2];
        UNROLL
        for (int i = 0; i < 2; i++) {
          top[i] = ::fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 4));
          top[i] = ::fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 8));
          top[i] = ::fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 16));
          shrink[i] = ::exp2f(m[n][i] - top[i]);
          m[n][i] = top[i];
          l[n][i] *= shrink[i];
        }
        UNROLL
        for (int i = 0; i < VT * 16; i++) acc[n][i / 16][i / 4 % 4][i % 4] *= shrink[i % 2];
        UNROLL
        for (int u = 0; u < U; u++) {
          // Rows of 8 tokens x 8 heads become, transposed, the B fragment: column (head) r, tokens 2c and 2c + 1.
          uint high[2], rest[2];
          UNROLL
          for (int half = 0; half < 2; half++) {
            float p[2];
            UNROLL
            for (int i = 0; i < 2; i++) {
              const float s = score[u][half * 2 + i];
              p[i] = s > NOTHING ? ::exp2f(s - top[i]) : 0.0f;
              l[n][i] += p[i];
            }
            const T p0 = static_cast<T>(p[0]);
            const T p1 = static_cast<T>(p[1]);
            high[half] = transpose8x8(pack(p0, p1));
            rest[half] = transpose8x8(pack(static_cast<T>(p[0] - static_cast<float>(p0)), static_cast<T>(p[1] - static_cast<float>(p1))));
          }
          UNROLL
          for (int vt = 0; vt < VT; vt++) {
            UNROLL
            for (int j = 0; j < 4; j++) {
              const uint v0 = word(values[u][0][vt], j), v1 = word(values[u][1][vt], j);
              const uint v2 = word(values[u][2][vt], j), v3 = word(values[u][3][vt], j);
              // Dim 2j of the lane's eight is row r of the tile, dim 2j + 1 row r + 8.
              const uint a0 = __byte_perm(v0, v1, 0x5410), a1 = __byte_perm(v0, v1, 0x7632);
              const uint a2 = __byte_perm(v2, v3, 0x5410), a3 = __byte_perm(v2, v3, 0x7632);
              mma<T>(acc[n][vt][j], a0, a1, a2, a3, high[0], high[1]);
              mma<T>(acc[n][vt][j], a0, a1, a2, a3, rest[0], rest[1]);
            }
          }
        }
      }
      if (more) {
        load_values(chunk + SG, ids);
        look_up(chunk + 2 * SG, ids);
      }
    }
