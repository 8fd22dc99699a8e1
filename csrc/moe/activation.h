// What stands between an expert's products: h = a(gate) * (up + beta). Plain C++, host and device.
#pragma once

#include <cmath>

#include "format/codebook.cuh"

namespace exl3 {

enum class ActivationKind : int { kSwiglu = 0, kGelu = 1, kGeluTanh = 2 };

inline constexpr float kTwoRootTwoOverPi = 1.5957691216057308f;  // GELU by tanh, as a sigmoid

// gate is first cut at `limit` from above, up at both sides; infinity cuts nothing. kSwiglu is
// gate * sigmoid(alpha * gate): alpha 1 and beta 0 are SiLU. The others do not look at alpha.
struct Activation {
  ActivationKind kind;
  float alpha, beta, limit;
};

EXL3_HOST_DEVICE float activate(const Activation& a, float gate, float up) {
  // Written so that NaN stays NaN.
  gate = gate > a.limit ? a.limit : gate;
  up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
  float g;
  if (a.kind == ActivationKind::kSwiglu) {
    g = gate / (1.0f + expf(-a.alpha * gate));
  } else if (a.kind == ActivationKind::kGelu) {
    g = 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f));
  } else {
    const float inner = 0.79788456080286536f * (gate + 0.044715f * gate * gate * gate);
    g = 0.5f * gate * (1.0f + tanhf(inner));
  }
  return g * (up + a.beta);
}

}  // namespace exl3
