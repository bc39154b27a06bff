  // Pages of quantised keys and values. A packet of VEC values lies in one group, whose scale and bias stay outside the
  // products: q . k = scale * (q . codes) + bias * sum(q). Codes are used where they stand in their word, times a power of
  // two, which the query takes away beforehand, and the accumulators in the end.
  constexpr int KW = VEC * KBITS / 32;
  constexpr int VW = VEC * VBITS / 32;
