  constexpr int K_CODES = D * KBITS / 32;
  constexpr int V_CODES = DV * VBITS / 32;
  constexpr int K_GROUPS = D / GS;
  constexpr int V_GROUPS = DV / GS;
  constexpr int FACTOR = static_cast<int>(sizeof(T));
  constexpr int K_PAGE = BS * (K_CODES + K_GROUPS * FACTOR / 2);
  constexpr int V_PAGE = BS * (V_CODES + V_GROUPS * FACTOR / 2);
