// Attention of one row (one query position of one sequence) over one partition, for the G query heads of one KV head. A
// row sees the tokens starts[row] <= t < ends[row]; nothing else is read.
//
//   paged_decode      (PAGED)      pages not quantised
//   quantized_decode  (QUANTIZED)  quantised pages
//   latent_decode     (LATENT)     latents, of which a token has one for all query heads
//
// Grid: x = KV head, y = row, z = partition; SG simdgroups. HS of them split the heads, SG / HS stripes split the
// tokens. Inside a simdgroup LPT lanes hold one token, so 32 / LPT tokens are processed at a time; U such steps make a
// chunk.
//
// A chunk has U * HG scores, and each lane has a partial sum of each, over the elements it holds. The partial sums are
// reduced by halving: in each step a lane keeps half of its scores and sends the other half to another lane. At the end
// each lane holds R complete scores, so a score's softmax is computed once instead of LPT times. Lane bit 0 stands for
// the top bit of a score's index u * HP + h, lane bit 1 for the next, and so on.

// Return which of OWNERS lanes holds score n.
#define SCORE_OWNER(n, OWNERS) \
  ((((n) & 1) << 4 | ((n) & 2) << 2 | ((n) & 4) | ((n) & 8) >> 2 | ((n) & 16) >> 4) / (32 / (OWNERS)))

#pragma kernel
constexpr int NK = (D + LPT * VEC - 1) / (LPT * VEC);    // packets of a key per lane
constexpr int NV = (DV + LPT * VEC - 1) / (LPT * VEC);   // packets of a value per lane
constexpr int TPS = 32 / LPT;                            // tokens per step
constexpr int CHUNK = U * TPS;
constexpr int HG = (G + HS - 1) / HS;                    // query heads per simdgroup
constexpr int HP = HG > 8 ? 16 : HG > 4 ? 8 : HG > 2 ? 4 : HG; // rounded up to a power of two
constexpr int NS = U * HP;                               // scores of a chunk
constexpr int OWNERS = NS < LPT ? NS : LPT;              // lanes with different scores at the end; the rest repeat them
constexpr int R = NS / OWNERS;                           // scores per owner
constexpr int BLOCKS = CHUNK > BS ? CHUNK / BS : 1;      // blocks that a chunk spans
constexpr int STRIPES = SG / HS;
constexpr float NOTHING = -3.0e38f;

threadgroup float tg_m[SG * HG];
threadgroup float tg_l[SG * HG];
threadgroup float tg_o[SG * HR * DV];

const int n_kv = static_cast<int>(threadgroups_per_grid.x);  // for latents: tiles of G query heads, all of one KV head
const int max_blocks = tables_shape[1];
const int q_len = ends_shape[1];
const int kv_head = static_cast<int>(threadgroup_position_in_grid.x);
const int row = static_cast<int>(threadgroup_position_in_grid.y);
const int partition = static_cast<int>(threadgroup_position_in_grid.z);
const int n_partitions = static_cast<int>(threadgroups_per_grid.z);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int sg = static_cast<int>(simdgroup_index_in_threadgroup);
const int sub = lane % LPT;
const int step_token = lane / LPT;
const int stripe = sg / HS;
const int head0 = (sg % HS) * HG;
const int sequence = row / q_len;
// The first line of this KV head; a line is one (sequence, query head, query position) of q and out.
const int64_t line0 = static_cast<int64_t>(sequence * n_kv + kv_head) * G * q_len + row % q_len;

const int begin = metal::max(static_cast<int>(starts[row]), 0);
const int end = static_cast<int>(ends[row]);
const Partitions partitions = partitions_of<PART, SPAN, FIRST>(begin, end);
const int size = partitions.size;
const int lo = metal::max(begin, partitions.origin + partition * size);
const int hi = metal::min(end, partitions.origin + partition * size + size);
// If params[2] is set (only with q_len 1), k_new and v_new hold the row's newest token. It is read from there, and the
// thread group of its partition stores it in its slot.
const int fresh = params[2] != 0.0f ? end - 1 : -1;
const int64_t fresh_row = static_cast<int64_t>(row) * n_kv + kv_head;

if (kv_head + row + partition + lane + sg == 0) {
  fence_out[0] = fence[0] + 1u;
}

if (lo < hi) {
  const float gain = SOFTCAP ? params[0] / params[1] : params[0] * LOG2E;
  float query[HG * NK * VEC];
  float acc[HG * NV * VEC];
  // State of the softmax for the scores that this lane holds at the end: heads first_head .. first_head + R - 1 of step
  // own_step.
  float m[R];
  float l[R];
  UNROLL
  for (int j = 0; j < R; j++) {
    m[j] = NOTHING;
    l[j] = 0.0f;
  }
  int own_step = 0;
  int first_head = 0;
  UNROLL
  for (int o = 1; o < OWNERS; o *= 2) {
    const int weight = (sub & o) != 0 ? NS / (2 * o) : 0;
    own_step += weight / HP;
    first_head += weight % HP;
  }
  UNROLL
  for (int h = 0; h < HG; h++) {
    UNROLL
    for (int i = 0; i < NK * VEC; i++) {
      const int dim = (i / VEC * LPT + sub) * VEC + i % VEC;
      query[h * NK * VEC + i] = dim < D && head0 + h < G ? gain * static_cast<float>(q[(line0 + (head0 + h) * q_len) * D + dim]) : 0.0f;
    }
    UNROLL
    for (int i = 0; i < NV * VEC; i++) {
      acc[h * NV * VEC + i] = 0.0f;
    }
  }

#if PAGED
  if (fresh >= lo && fresh < hi) {
    const int64_t at = (static_cast<int64_t>(tables[sequence * max_blocks + fresh / BS]) * n_kv + kv_head) * BS + fresh % BS;
    for (int dim = sg * 32 + lane; dim < D; dim += SG * 32) {
      const_cast<device T*>(k_pool)[at * D + dim] = k_new[fresh_row * D + dim];
    }
    for (int dim = sg * 32 + lane; dim < DV; dim += SG * 32) {
      const_cast<device T*>(v_pool)[at * DV + dim] = v_new[fresh_row * DV + dim];
    }
  }

#elif LATENT
  (void)fresh_row;  // used only for keys with heads
  // latent_decode: a token has a latent of DV elements in k_pool and a rotary part of D - DV elements in v_pool. Its
  // key is the latent followed by the rotary part. Its value is the latent, so a lane's key packets already hold its
  // value.
  if (kv_head == 0 && fresh >= lo && fresh < hi) {
    const int64_t at = static_cast<int64_t>(tables[sequence * max_blocks + fresh / BS]) * BS + fresh % BS;
    for (int dim = sg * 32 + lane; dim < DV; dim += SG * 32) {
      const_cast<device T*>(k_pool)[at * DV + dim] = k_new[static_cast<int64_t>(row) * DV + dim];
    }
    for (int dim = sg * 32 + lane; dim < D - DV; dim += SG * 32) {
      const_cast<device T*>(v_pool)[at * (D - DV) + dim] = v_new[static_cast<int64_t>(row) * (D - DV) + dim];
    }
  }

#elif QUANTIZED
  // Pages of quantised keys and values. A packet of VEC values is part of one group, whose scale and bias stay outside
  // the products: q . k = scale * (q . codes) + bias * sum(q). Codes stay in their place in their word, where they
  // count code times a power of two. The query is divided by that power at the start, the accumulators at the end.
  constexpr int KW = VEC * KBITS / 32;
  constexpr int VW = VEC * VBITS / 32;
  constexpr int K_CODES = D * KBITS / 32;
  constexpr int V_CODES = DV * VBITS / 32;
  constexpr int K_GROUPS = D / GS;
  constexpr int V_GROUPS = DV / GS;
  constexpr int FACTOR = static_cast<int>(sizeof(T));
  constexpr int K_PAGE = BS * (K_CODES + K_GROUPS * FACTOR / 2);
  constexpr int V_PAGE = BS * (V_CODES + V_GROUPS * FACTOR / 2);
  float query_sum[HG * NK];
  float base[HG * NV];  // weighted biases, added to the accumulators at the end
  UNROLL
  for (int i = 0; i < HG * NV; i++) {
    base[i] = 0.0f;
  }
  UNROLL
  for (int i = 0; i < HG * NK; i++) {
    query_sum[i] = 0.0f;
    UNROLL
    for (int j = 0; j < VEC; j++) {
      query_sum[i] += query[i * VEC + j];
      query[i * VEC + j] *= 1.0f / static_cast<float>(1 << PLACE(j * KBITS));
    }
  }
  // Each pool is written and read through one pointer: a compiler may assume that memory reached through one buffer
  // argument, or through a const one, is not written through another.
  auto k_pages = const_cast<device uint*>(k_pool);
  auto v_pages = const_cast<device uint*>(v_pool);
  if (fresh >= lo && fresh < hi) {
    const int64_t page = static_cast<int64_t>(tables[sequence * max_blocks + fresh / BS]) * n_kv + kv_head;
    for (int group = sg; group < K_GROUPS + V_GROUPS; group += SG) {
      if (group < K_GROUPS) {
        quantize_group<T, KBITS, D, GS, BS>(k_new + fresh_row * D, 1, k_pages + page * K_PAGE, fresh % BS, group, lane);
      } else {
        quantize_group<T, VBITS, DV, GS, BS>(v_new + fresh_row * DV, 1, v_pages + page * V_PAGE, fresh % BS, group - K_GROUPS, lane);
      }
    }
    // The token is read below as its page holds it, so wait for the stores of this thread group.
    threadgroup_barrier(mem_flags::mem_device);
  }
#endif
  const int first_chunk = lo / CHUNK;
  const int last_chunk = (hi - 1) / CHUNK;
  const auto table = tables + sequence * max_blocks;
  int chunk = first_chunk + (stripe + STRIPES - first_chunk % STRIPES) % STRIPES;
  // Block ids are looked up one chunk ahead.
  int blocks[BLOCKS];
  look_up_blocks<CHUNK, BS, BLOCKS>(table, chunk, lo, hi, blocks);
  for (; chunk <= last_chunk; chunk += STRIPES) {
#if PAGED || LATENT
    // A lane's packets of a token: those of its key, and after them those of its value. A latent's value is the beginning
    // of its key.
#if PAGED
    constexpr int PACKETS = NK + NV;
    constexpr int VALUE = NK;
#else
    constexpr int PACKETS = NK;
    constexpr int VALUE = 0;
#endif
    Packet<T, VEC> packets[U * PACKETS];
    UNROLL
    for (int u = 0; u < U; u++) {
      // A token outside [lo, hi) is replaced by the nearest one inside (its score is dropped below), so that every
      // address is of a live token.
      const int token = chunk * CHUNK + u * TPS;
      const int position = metal::min(metal::max(token + step_token, lo), hi - 1);
#if PAGED
      const int64_t base = (static_cast<int64_t>(blocks[u * TPS / BS]) * n_kv + kv_head) * BS;
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
#else
      const int64_t slot = static_cast<int64_t>(blocks[u * TPS / BS]) * BS + position % BS;
      auto latent = position == fresh ? k_new + static_cast<int64_t>(row) * DV : k_pool + slot * DV;
      auto rotated = position == fresh ? v_new + static_cast<int64_t>(row) * (D - DV) : v_pool + slot * (D - DV);
      UNROLL
      for (int i = 0; i < NK; i++) {
        const int dim = (i * LPT + sub) * VEC;
        packets[u * PACKETS + i] = dim < DV ? load_packet<T, VEC>(latent + dim) : dim < D ? load_packet<T, VEC>(rotated + (dim - DV)) : zero_packet<T, VEC>();
      }
#endif
    }
#elif QUANTIZED
    uint keys[U * NK * KW];
    uint values[U * NV * VW];
    T key_scale[U * NK];
    T key_bias[U * NK];
    T value_scale[U * NV];
    T value_bias[U * NV];
    UNROLL
    for (int u = 0; u < U; u++) {
      // A token outside [lo, hi) is replaced by the nearest one inside (its score is dropped below), so that every
      // address is of a live token. A packet past the end of a row is replaced by the row's first one: its query is 0.
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
#endif
    look_up_blocks<CHUNK, BS, BLOCKS>(table, chunk + STRIPES, lo, hi, blocks);
    float score[NS];
    UNROLL
    for (int u = 0; u < U; u++) {
      UNROLL
      for (int h = 0; h < HP; h++) {
        score[u * HP + h] = 0.0f;
      }
#if QUANTIZED
      UNROLL
      for (int i = 0; i < NK; i++) {
        float product[HG];
        UNROLL
        for (int h = 0; h < HG; h++) {
          product[h] = 0.0f;
        }
        UNROLL
        for (int j = 0; j < VEC; j++) {
          const float code = code_in_place<KBITS>(keys[(u * NK + i) * KW + j * KBITS / 32], j * KBITS % 32);
          UNROLL
          for (int h = 0; h < HG; h++) {
            product[h] = metal::fma(query[(h * NK + i) * VEC + j], code, product[h]);
          }
        }
        const float scale = static_cast<float>(key_scale[u * NK + i]);
        const float bias = static_cast<float>(key_bias[u * NK + i]);
        UNROLL
        for (int h = 0; h < HG; h++) {
          score[u * HP + h] = metal::fma(scale, product[h], metal::fma(bias, query_sum[h * NK + i], score[u * HP + h]));
        }
      }
#else
      UNROLL
      for (int i = 0; i < NK * VEC; i++) {
        const float key = packet_value<T, VEC>(packets[u * PACKETS + i / VEC], i % VEC);
        UNROLL
        for (int h = 0; h < HG; h++) {
          score[u * HP + h] = metal::fma(query[h * NK * VEC + i], key, score[u * HP + h]);
        }
      }
#endif
    }
    UNROLL
    for (int o = 1; o < OWNERS; o *= 2) {
      const bool upper = (sub & o) != 0;
      UNROLL
      for (int i = 0; i < NS / 2; i++) {
        if (i < NS / (2 * o)) {
          const float low = score[i];
          const float high = score[i + NS / (2 * o)];
          score[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, static_cast<ushort>(o));
        }
      }
    }
    UNROLL
    for (int o = OWNERS; o < LPT; o *= 2) {
      score[0] += simd_shuffle_xor(score[0], static_cast<ushort>(o));
    }

    const int own_token = chunk * CHUNK + own_step * TPS + step_token;
    const bool is_visible = own_token >= lo && own_token < hi;
    float shrink[R];
    UNROLL
    for (int j = 0; j < R; j++) {
      const float s = SOFTCAP ? metal::precise::tanh(score[j]) * (params[1] * LOG2E) : score[j];
      score[j] = is_visible ? s : NOTHING;
      float m_new = metal::max(m[j], score[j]);
      UNROLL
      for (int o = 1; o < U; o *= 2) {
        m_new = metal::max(m_new, simd_shuffle_xor(m_new, static_cast<ushort>(o)));
      }
      UNROLL
      for (int o = LPT; o < 32; o *= 2) {
        m_new = metal::max(m_new, simd_shuffle_xor(m_new, static_cast<ushort>(o)));
      }
      shrink[j] = metal::fast::exp2(m[j] - m_new);
      m[j] = m_new;
      score[j] = is_visible ? metal::fast::exp2(score[j] - m_new) : 0.0f;
      l[j] = metal::fma(l[j], shrink[j], score[j]);
    }

    // Send every lane the factors that scale down its accumulators, and the weights of its values.
    UNROLL
    for (int h = 0; h < HG; h++) {
      const float factor = simd_shuffle(shrink[h % R], static_cast<ushort>(lane - sub + SCORE_OWNER(h / R, OWNERS)));
      UNROLL
      for (int i = 0; i < NV * VEC; i++) {
        acc[h * NV * VEC + i] *= factor;
      }
#if QUANTIZED
      UNROLL
      for (int i = 0; i < NV; i++) {
        base[h * NV + i] *= factor;
      }
#endif
    }
    UNROLL
    for (int u = 0; u < U; u++) {
      float p[HG];
      UNROLL
      for (int h = 0; h < HG; h++) {
        p[h] = simd_shuffle(score[h % R], static_cast<ushort>(lane - sub + SCORE_OWNER((u * HP + h) / R, OWNERS)));
      }
#if QUANTIZED
      UNROLL
      for (int i = 0; i < NV; i++) {
        const float scale = static_cast<float>(value_scale[u * NV + i]);
        const float bias = static_cast<float>(value_bias[u * NV + i]);
        float weight[HG];
        UNROLL
        for (int h = 0; h < HG; h++) {
          weight[h] = p[h] * scale;
          base[h * NV + i] = metal::fma(p[h], bias, base[h * NV + i]);
        }
        UNROLL
        for (int j = 0; j < VEC; j++) {
          const float code = code_in_place<VBITS>(values[(u * NV + i) * VW + j * VBITS / 32], j * VBITS % 32);
          UNROLL
          for (int h = 0; h < HG; h++) {
            acc[(h * NV + i) * VEC + j] = metal::fma(weight[h], code, acc[(h * NV + i) * VEC + j]);
          }
        }
      }
#else
      UNROLL
      for (int i = 0; i < NV * VEC; i++) {
        const float value = packet_value<T, VEC>(packets[u * PACKETS + VALUE + i / VEC], i % VEC);
        UNROLL
        for (int h = 0; h < HG; h++) {
          acc[h * NV * VEC + i] = metal::fma(p[h], value, acc[h * NV * VEC + i]);
        }
      }
#endif
    }
  }
#if QUANTIZED
  UNROLL
  for (int i = 0; i < HG * NV * VEC; i++) {
    acc[i] = metal::fma(acc[i], 1.0f / static_cast<float>(1 << PLACE(i % VEC * VBITS)), base[i / VEC]);
  }
#endif

  // Sum over the tokens that this simdgroup processed side by side, then over the stripes.
  UNROLL
  for (int j = 0; j < R; j++) {
    UNROLL
    for (int o = 1; o < U; o *= 2) {
      l[j] += simd_shuffle_xor(l[j], static_cast<ushort>(o));
    }
    UNROLL
    for (int o = LPT; o < 32; o *= 2) {
      l[j] += simd_shuffle_xor(l[j], static_cast<ushort>(o));
    }
    if (own_step == 0 && step_token == 0 && sub < OWNERS && first_head + j < HG) {
      tg_m[sg * HG + first_head + j] = m[j];
      tg_l[sg * HG + first_head + j] = l[j];
    }
  }
  UNROLL
  for (int i = 0; i < HG * NV * VEC; i++) {
    UNROLL
    for (int o = LPT; o < 32; o *= 2) {
      acc[i] += simd_shuffle_xor(acc[i], static_cast<ushort>(o));
    }
  }
  // Threadgroup memory has room for HR heads of each simdgroup at a time.
  UNROLL
  for (int h0 = 0; h0 < HG; h0 += HR) {
    if (h0 > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    UNROLL
    for (int r = 0; r < HR; r++) {
      UNROLL
      for (int i = 0; i < NV * VEC; i++) {
        const int dim = (i / VEC * LPT + sub) * VEC + i % VEC;
        if (step_token == 0 && dim < DV && h0 + r < HG) {
          tg_o[(sg * HR + r) * DV + dim] = acc[(h0 + r < HG ? h0 + r : 0) * NV * VEC + i];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int item = sg * 32 + lane; item < HS * HR * DV; item += SG * 32) {
      const int dim = item % DV;
      const int r = item / DV % HR;
      const int share = item / (DV * HR);
      const int head = share * HG + h0 + r;
      if (h0 + r < HG && head < G) {
        float top = NOTHING;
        UNROLL
        for (int s = 0; s < STRIPES; s++) {
          top = metal::max(top, tg_m[(s * HS + share) * HG + h0 + r]);
        }
        float total = 0.0f;
        float o = 0.0f;
        UNROLL
        for (int s = 0; s < STRIPES; s++) {
          const float weight = metal::fast::exp2(tg_m[(s * HS + share) * HG + h0 + r] - top);
          total = metal::fma(tg_l[(s * HS + share) * HG + h0 + r], weight, total);
          o = metal::fma(tg_o[((s * HS + share) * HR + r) * DV + dim], weight, o);
        }
        const float sink = SINKS ? static_cast<float>(sinks[kv_head * G + head]) * LOG2E : 0.0f;
        const int64_t at = (line0 + head * q_len) * n_partitions + partition;
        store_result<O, DV, SINGLE, SINKS>(out, stats, at, dim, top, total, o, sink);
      }
    }
  }
} else {
  // No visible token: merge_partitions never reads such a partition, and a row that sees no token gets zeros.
  for (int item = sg * 32 + lane; item < G * DV; item += SG * 32) {
    const int64_t at = (line0 + item / DV * q_len) * n_partitions + partition;
    if (item % DV == 0) {
      stats[at * 2] = NOTHING;
      stats[at * 2 + 1] = 0.0f;
    }
    if (SINGLE) {
      out[at * DV + item % DV] = static_cast<O>(0.0f);
    }
  }
}
