// CUDA only: paged_decode_tensor for pages of quantised keys and values (quantized/pages.py), whose codes of 8 or 4 bits the
// tensor cores multiply as they are, as 16-bit floats with an offset (tensor_codes.cuh). What is uniform in a group stays out:
//   scores  S[token, head]  = sum over groups of s_g (C[token, dim] Q[dim, head]) + b_g sum(Q[dim, head])
//   output  O[dim, head]   += C^T[dim, token] (s_g P)[token, head], and at the end sum(b_g P) of the dim's group
// Queries and weights are float16 there, whatever T is: both are multiplied by powers of two so that the largest is just below
// 2^15. A query of bfloat16 loses nothing by that; a weight is rounded to 2^-11 of its size, and what its offset adds goes with the
// rounded one, so that only codes feel it.
// Codes become factors once for all heads. In a group, lane c has a fourth of a key row. A product has 8 columns: where that is room
// for all heads PG times, it takes PG groups of values side by side, lane r an eighth of them. The columns of a group have its scales,
// and of the result only what is of a column's own group is an output.
constexpr int NT = (G + 7) / 8;
constexpr int KG = D / GS;   // groups of a row
constexpr int VG = DV / GS;
constexpr int KC = D * KBITS / 32;   // words of a row's codes; its scales and biases are as many as it has groups
constexpr int VC = DV * VBITS / 32;
constexpr int KW = GS * KBITS / 128;                          // words of a lane and group of a key row
constexpr int KL = KW < 4 ? KW : 4;                           // of one load
constexpr int MOST = 1024 / (GS * VBITS);  // groups of which an eighth is a load of 16 bytes
constexpr int PG = VG % 4 == 0 && G <= 2 && MOST >= 4 ? 4 : VG % 2 == 0 && G <= 4 && MOST >= 2 ? 2 : 1;
constexpr int COLUMNS = 8 / PG;      // of a group, if there are several
constexpr int VP = VG / PG;          // products of a value row
constexpr int VD = GS * PG / 8;      // dims of a lane and product of a value row
constexpr int VW = VD * VBITS < 32 ? 1 : VD * VBITS / 32;  // words of them, or half of one
constexpr int TILES = DV / 16;
