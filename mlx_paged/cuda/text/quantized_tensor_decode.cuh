// CUDA only: paged_decode_tensor for pages of quantised keys and values (PageShape). The tensor cores multiply codes of
// 8 or 4 bits directly, as float16 with an offset (tensor_codes). A group's scale s_g and bias b_g are applied to
// products and weights:
//   scores  S[token, head]  = sum over groups of s_g (C[token, dim] Q[dim, head]) + b_g sum(Q[dim, head])
//   output  O[dim, head]   += C^T[dim, token] (s_g P)[token, head], and at the end sum(b_g P) of the dim's group
// Queries and weights are float16, whatever T is: both are multiplied by powers of two so that the largest is just
// below 2^15. A query of bfloat16 loses nothing. A weight is rounded to 2^-11 of its size. What an offset adds is
// subtracted for the rounded weight, so rounding affects only the part of the codes.
// Codes become factors once for all heads. Lane c has a fourth of a group of a key row. A product has 8 columns: if all
// heads fit into them PG times, a product covers PG groups of values side by side, of which lane r has an eighth. Each
// group has columns of its own, with its scales; only a group's values in its own columns are outputs.
#if COMMON
// shared_quantized_decode_tensor is this for rows with common blocks (see tensor_decode.cuh). Its columns are the query
// heads of all rows, so codes become factors once for all of them.
constexpr int HEADS = G * ROWS;
#else
constexpr int HEADS = G;
#endif
constexpr int NT = (HEADS + 7) / 8;
constexpr int KG = D / GS;   // groups of a row
constexpr int VG = DV / GS;
constexpr int KC = D * KBITS / 32;   // words of a row's codes; its scales and biases take KG words
constexpr int VC = DV * VBITS / 32;
constexpr int KW = GS * KBITS / 128;                          // words per lane and group of a key row
constexpr int KL = KW < 4 ? KW : 4;                           // words per load
constexpr int MOST = 1024 / (GS * VBITS);  // groups whose eighth is a load of 16 bytes
constexpr int PG = VG % 4 == 0 && HEADS <= 2 && MOST >= 4 ? 4 : VG % 2 == 0 && HEADS <= 4 && MOST >= 2 ? 2 : 1;
constexpr int COLUMNS = 8 / PG;      // columns per group
constexpr int VP = VG / PG;          // products per value row
constexpr int VD = GS * PG / 8;      // dims per lane and product of a value row
constexpr int VW = VD * VBITS < 32 ? 1 : VD * VBITS / 32;  // words of them; half a word counts as one
constexpr int TILES = DV / 16;
// The dim of an output at a place in tg_o. Place 8 k + r is the k-th dim of lane r.
auto dim_of = [&](int place) { return place / 8 / VD * (VD * 8) + place % 8 * VD + place / 8 % VD; };
#include "tensor_rows.cuh"
// A warp's chunks, from queries and codes to the accumulators of a partition.
if (first <= last) {
  const int* table = tables + sequence * max_blocks;
  uint query[NT][KG][GS / 32][4];           // column (head) r: lane c's fourth of a group, eight dims each
  float sums[NT][KG][2];                    // heads 2c and 2c + 1: sums over a group's dims
  float base[NT][KG][2];                    // minus what offsets add to a group's products, with two kinds of pairs
  float gain[NT][2];
  UNROLL
  for (int n = 0; n < NT; n++) {
    const int head = n * 8 + r % COLUMNS;
    uint4 raw[KG][GS / 32];
    float most = 0.0f;
    UNROLL
    for (int g = 0; g < KG; g++) {
      UNROLL
      for (int e = 0; e < GS / 32; e++) {
        // Lane c has every fourth load of a group.
        constexpr int EIGHTS = KL * 4 / KBITS;
        const int dim = g * GS + (e / EIGHTS * 4 + c) * (EIGHTS * 8) + e % EIGHTS * 8;
        raw[g][e] = make_uint4(0, 0, 0, 0);
        if (head < heads) raw[g][e] = *reinterpret_cast<const uint4*>(q + line_of(head) * D + dim);
        UNROLL
        for (int i = 0; i < 8; i++) most = ::fmaxf(most, ::fabsf(value_of<T>(word(raw[g][e], i / 2), i % 2)));
      }
    }
    most = ::fmaxf(most, simd_shuffle_xor(most, 1));
    most = ::fmaxf(most, simd_shuffle_xor(most, 2));
    const unsigned exponent = exponent_of(most);
    const float own_gain = (SOFTCAP ? params[0] / params[1] : params[0] * LOG2E) * from_half_range(exponent);
    UNROLL
    for (int g = 0; g < KG; g++) {
      float sum[2] = {0.0f, 0.0f};  // per kind of pairs
      UNROLL
      for (int e = 0; e < GS / 32; e++) {
        UNROLL
        for (int i = 0; i < 4; i++) {
          float x[2];
          UNROLL
          for (int j = 0; j < 2; j++) {
            const int at = pair_member<KBITS>(i, j);
            x[j] = value_of<T>(word(raw[g][e], at / 2), at % 2) * to_half_range(exponent);
            sum[i % 2] += x[j];
          }
          query[n][g][e][i] = pack_rounded<Half>(x[0], x[1]);
        }
      }
      UNROLL
      for (int i = 0; i < 2; i++) {
        sum[i] += simd_shuffle_xor(sum[i], 1);
        sum[i] += simd_shuffle_xor(sum[i], 2);
      }
      UNROLL
      for (int i = 0; i < 2; i++) {
        const int other = c * 8 + i * 4;
        sums[n][g][i] = simd_shuffle(sum[0] + sum[1], other);
        if (KINDS<KBITS> == 2) base[n][g][i] = simd_shuffle(-(sum[0] * offset_of<KBITS>(0) + sum[1] * offset_of<KBITS>(1)), other);
      }
    }
    UNROLL
    for (int i = 0; i < 2; i++) gain[n][i] = simd_shuffle(own_gain, c * 8 + i * 4);
  }
  float acc[NT][TILES][4];
  // Sums over a lane's tokens for heads 2c and 2c + 1: of p * bias, and of the rounded weights. Offsets have added the
  // latter times the offset.
  float plus[NT][VP][2], added[NT][VP][2];
  float m[NT][2], l[NT][2];

  const int first_chunk = lo / CHUNK;
  const int last_chunk = (hi - 1) / CHUNK;
  const int first_block = lo / BS;
  const int last_block = (hi - 1) / BS;
  // Look up the block ids of a chunk's 8-token halves, once per block. A half or token outside [lo, hi) is replaced by
  // the nearest one inside, so that every address is of a live token.
  auto look_up = [&](int chunk, int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 2; i++) {
      ids[i] = i == 0 || i * 8 % BS == 0 ? table[metal::min(metal::max((chunk * CHUNK + i * 8) / BS, first_block), last_block)] : ids[i - 1];
    }
  };
  auto slot = [&](int token) { return metal::min(metal::max(token, lo), hi - 1) % BS; };
  // Strides are in bytes, so that an address is a product and a sum. Codes are those of this lane.
  const int k_stride = n_kv * (BS * (KC + KG) * 4), v_stride = n_kv * (BS * (VC + VG) * 4);
  const char* k_codes = reinterpret_cast<const char*>(k_pool + kv_head * (BS * (KC + KG)) + c * KL);
  const char* k_page = reinterpret_cast<const char*>(k_pool + kv_head * (BS * (KC + KG)) + BS * KC);
  const char* v_codes = reinterpret_cast<const char*>(v_pool + kv_head * (BS * (VC + VG))) + r * (VD * VBITS / 8);
  const char* v_page = reinterpret_cast<const char*>(v_pool + kv_head * (BS * (VC + VG)) + BS * VC);
  auto row_of = [&](const char* first, int stride, int id, int at, int bytes) {
    return first + static_cast<int64_t>(id) * stride + static_cast<int64_t>(at) * bytes;
  };
  unsigned keys[U][2][KG][KW];       // token r of each half
  unsigned values[U][4][VP][VW];     // tokens 2c, 2c + 1 of each half
  unsigned key_factors[U][2][KG];    // token r of each half: scales, then biases
  unsigned value_factors[U][2][VG];
  auto load_keys = [&](int chunk, const int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 2; i++) {
      const int at = slot(chunk * CHUNK + i * 8 + r);
      const auto* codes = reinterpret_cast<const unsigned*>(row_of(k_codes, k_stride, ids[i], at, KC * 4));
      UNROLL
      for (int w = 0; w < KG * KW; w += KL) stream_words<KL, KL * 16 % 32 == 0>(codes + w * 4, &keys[i / 2][i % 2][w / KW][w % KW]);
      load_factors(reinterpret_cast<const unsigned*>(row_of(k_page, k_stride, ids[i], at, KG * 4)), key_factors[i / 2][i % 2]);
    }
  };
  auto load_values = [&](int chunk, const int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 4; i++) {
      const int at = slot(chunk * CHUNK + i / 2 * 8 + c * 2 + i % 2);
      const char* codes = row_of(v_codes, v_stride, ids[i / 2], at, VC * 4);
      UNROLL
      for (int g = 0; g < VP; g++) {
        if (VD * VBITS < 32) {
          values[i / 4][i % 4][g][0] = stream_half_word(reinterpret_cast<const unsigned short*>(codes) + g * 8);
        } else {
          stream_words<VW, true>(reinterpret_cast<const unsigned*>(codes) + g * (VW * 8), values[i / 4][i % 4][g]);
        }
      }
      if (i % 2 == 0) {
        const int own = slot(chunk * CHUNK + i / 2 * 8 + r);
        load_factors(reinterpret_cast<const unsigned*>(row_of(v_page, v_stride, ids[i / 2], own, VG * 4)), value_factors[i / 4][i / 2 % 2]);
      }
    }
  };

  // Software pipeline: the registers of a chunk's keys are refilled as soon as its scores are known, those of its
  // values at the end, so that loads are always in flight; block ids are fetched two chunks ahead.
  int ids[U * 2];
  if (fresh >= lo && fresh < hi && fresh / CHUNK % SG == warp) {
    // Quantised and stored by the warp that loads it again below.
    const int64_t page = static_cast<int64_t>(table[fresh / BS]) * n_kv + kv_head;
    quantize_row<T, KBITS, D, GS, BS>(k_new + unit * D, const_cast<unsigned*>(k_pool) + page * (BS * (KC + KG)), fresh % BS, lane);
    quantize_row<T, VBITS, DV, GS, BS>(v_new + unit * DV, const_cast<unsigned*>(v_pool) + page * (BS * (VC + VG)), fresh % BS, lane);
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
    unsigned range = 15;  // largest exponent of the scales so far, which sets the weights' power of two
    UNROLL
    for (int n = 0; n < NT; n++) {
      UNROLL
      for (int i = 0; i < TILES * 4; i++) acc[n][i / 4][i % 4] = 0.0f;
      UNROLL
      for (int i = 0; i < VP * 2; i++) plus[n][i / 2][i % 2] = added[n][i / 2][i % 2] = 0.0f;
      m[n][0] = m[n][1] = NOTHING;
      l[n][0] = l[n][1] = 0.0f;
    }
    const int part_end = metal::min(last_chunk, (origin + (first + part + 1) * size) / CHUNK - 1);
    for (; chunk <= part_end; chunk += SG) {
      const bool more = chunk + SG <= last_chunk;
      float scores[NT][U][4];  // (token r, heads 2c and 2c + 1), then token r + 8
      UNROLL
      for (int u = 0; u < U; u++) {
        UNROLL
        for (int g = 0; g < KG; g++) {
          float products[NT][4];
          UNROLL
          for (int i = 0; i < NT * 4; i++) products[i / 4][i % 4] = KINDS<KBITS> == 2 ? base[i / 4][g][i % 2] : -OFFSET * sums[i / 4][g][i % 2];
          UNROLL
          for (int e = 0; e < GS / 32; e++) {
            unsigned a[4], b[4];
            code_pairs<KBITS>(&keys[u][0][g][e * KBITS / 4], a);
            code_pairs<KBITS>(&keys[u][1][g][e * KBITS / 4], b);
            UNROLL
            for (int n = 0; n < NT; n++) {
              const auto& column = query[n][g][e];
              mma<Half>(products[n], a[0], b[0], a[1], b[1], column[0], column[1]);
              mma<Half>(products[n], a[2], b[2], a[3], b[3], column[2], column[3]);
            }
          }
          UNROLL
          for (int half = 0; half < 2; half++) {
            const auto& factors = key_factors[u][half];
            const float scale = value_of<T>(factors[g / 2], g % 2), bias = value_of<T>(factors[(KG + g) / 2], (KG + g) % 2);
            UNROLL
            for (int n = 0; n < NT; n++) {
              UNROLL
              for (int i = 0; i < 2; i++) {
                float& score = scores[n][u][half * 2 + i];
                const float product = g == 0 ? bias * sums[n][g][i] : ::fmaf(bias, sums[n][g][i], score);
                score = ::fmaf(scale, products[n][half * 2 + i], product);
              }
            }
          }
        }
      }
      if (more) load_keys(chunk + SG, ids);

      bool grown = false;
      float shrink[NT][2];
      UNROLL
      for (int n = 0; n < NT; n++) {
        float top[2] = {m[n][0], m[n][1]};
        UNROLL
        for (int u = 0; u < U; u++) {
          UNROLL
          for (int i = 0; i < 4; i++) {
            const int token = chunk * CHUNK + u * 16 + i / 2 * 8 + r;
            float s = scores[n][u][i] * gain[n][i % 2];
            if (SOFTCAP) s = product(::tanhf(s), params[1] * LOG2E);
            scores[n][u][i] = token >= lo && token < hi ? s : NOTHING;
            top[i % 2] = ::fmaxf(top[i % 2], scores[n][u][i]);
          }
        }
        UNROLL
        for (int i = 0; i < 2; i++) {
          top[i] = ::fmaxf(top[i], simd_shuffle_xor(top[i], 4));
          top[i] = ::fmaxf(top[i], simd_shuffle_xor(top[i], 8));
          top[i] = ::fmaxf(top[i], simd_shuffle_xor(top[i], 16));
          shrink[n][i] = metal::fast::exp2(m[n][i] - top[i]);
          grown = grown || shrink[n][i] != 1.0f;
          m[n][i] = top[i];
          l[n][i] = product(l[n][i], shrink[n][i]);
        }
        UNROLL
        for (int u = 0; u < U; u++) {
          UNROLL
          for (int i = 0; i < 4; i++) {
            float& s = scores[n][u][i];  // a weight from here on; 0 for dead tokens, since each chunk has a live one
            s = metal::fast::exp2(s - top[i % 2]);
            l[n][i % 2] += s;
          }
        }
      }
      // Most chunks raise no maximum, and no largest scale.
      if (simd_any(grown)) {
        UNROLL
        for (int n = 0; n < NT; n++) {
          UNROLL
          for (int i = 0; i < TILES * 4; i++) acc[n][i / 4][i % 4] *= shrink[n][i % 2];
          UNROLL
          for (int i = 0; i < VP * 2; i++) {
            plus[n][i / 2][i % 2] *= shrink[n][i % 2];
            added[n][i / 2][i % 2] *= shrink[n][i % 2];
          }
        }
      }
      float most = 0.0f;
      UNROLL
      for (int i = 0; i < U * 2 * VG; i++) {
        const int g = i % VG;
        most = ::fmaxf(most, ::fabsf(value_of<T>(value_factors[i / VG / 2][i / VG % 2][g / 2], g % 2)));
      }
      const unsigned exponent = exponent_of(largest_of(most));
      if (exponent > range) {
        UNROLL
        for (int i = 0; i < NT * TILES * 4; i++) acc[i / (TILES * 4)][i / 4 % TILES][i % 4] *= power_of_two(range, exponent);
        UNROLL
        for (int i = 0; i < NT * VP * 2; i++) added[i / (VP * 2)][i / 2 % VP][i % 2] *= power_of_two(range, exponent);
        range = exponent;
      }

      UNROLL
      for (int u = 0; u < U; u++) {
        UNROLL
        for (int g = 0; g < VP; g++) {
          // 8 tokens x 8 heads, transposed, are the B fragment: column (head) r, tokens 2c and 2c + 1.
          unsigned weight[NT][2];
          UNROLL
          for (int half = 0; half < 2; half++) {
            const auto& factors = value_factors[u][half];
            const float scale = factor_of<T, PG>(factors, 0, g, c), bias = factor_of<T, PG>(factors, VG, g, c);
            const float ranged = scale * to_half_range(range);
            UNROLL
            for (int n = 0; n < NT; n++) {
              const float* p = &scores[n][u][half * 2];
              const unsigned rounded = pack_rounded<Half>(p[0] * ranged, p[1] * ranged);
              UNROLL
              for (int i = 0; i < 2; i++) {
                plus[n][g][i] = ::fmaf(p[i], bias, plus[n][g][i]);
                added[n][g][i] += value_of<Half>(rounded, i);
              }
              weight[n][half] = transpose8x8(rounded);
            }
          }
          UNROLL
          for (int four = 0; four < VD / 4; four++) {
            const int w = four * VBITS / 8;
            unsigned a[4], b[4];
            token_pairs<VBITS>(values[u][0][g][w], values[u][1][g][w], four % 2, a);
            token_pairs<VBITS>(values[u][2][g][w], values[u][3][g][w], four % 2, b);
            UNROLL
            for (int j = 0; j < 2; j++) {
              // Dim 2j of the four is row r of the tile, dim 2j + 1 row r + 8.
              UNROLL
              for (int n = 0; n < NT; n++) {
                auto& tile = acc[n][(g * (VD / 4) + four) * 2 + j];
                mma<Half>(tile, a[j * 2], a[j * 2 + 1], b[j * 2], b[j * 2 + 1], weight[n][0], weight[n][1]);
              }
            }
          }
        }
      }
      if (more) {
        load_values(chunk + SG, ids);
        look_up(chunk + 2 * SG, ids);
      }
    }

    // Subtract what the offsets have added, and add the part of the biases.
    UNROLL
    for (int i = 0; i < NT * VP * 2; i++) {
      UNROLL
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        plus[i / (VP * 2)][i / 2 % VP][i % 2] += simd_shuffle_xor(plus[i / (VP * 2)][i / 2 % VP][i % 2], lanes);
        added[i / (VP * 2)][i / 2 % VP][i % 2] += simd_shuffle_xor(added[i / (VP * 2)][i / 2 % VP][i % 2], lanes);
      }
    }
    UNROLL
    for (int i = 0; i < NT * TILES * 4; i++) {
      const int n = i / (TILES * 4), g = i / 4 % TILES / (VD / 2);
      float& x = acc[n][i / 4 % TILES][i % 4];
      x = ::fmaf(::fmaf(added[n][g][i % 2], -offset_of<VBITS>(i / 2 % KINDS<VBITS>), x), from_half_range(range), plus[n][g][i % 2]);
    }
    if (part > 0) __syncthreads();
    store_sums(m, l);
    UNROLL
    for (int h0 = 0; h0 < HEADS; h0 += HR) {
      if (h0 > 0) __syncthreads();
      // Store a warp's outputs of a round for the other warps.
      UNROLL
      for (int n = 0; n < NT; n++) {
        UNROLL
        for (int i = 0; i < TILES * 4; i++) {
          const int head = n * 8 + (c * 2 + i % 2) % COLUMNS;
          if (c * 2 / COLUMNS == r * PG / 8 && head >= h0 && head < h0 + HR && head < heads) tg_o[warp * HR + head - h0][i / 2 * 8 + r] = acc[n][i / 4][i % 4];
        }
      }
#include "join_warps.cuh"
    }
  }
}
#if OWN
#include "join_runs.cuh"
#endif
