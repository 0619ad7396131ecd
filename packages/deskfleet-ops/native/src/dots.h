// Sums of products, the bulk of the work. Both factors come from bf16 or float, so that every product is exact in double
// and fusing it with its addition changes nothing: this is the one file compiled with contraction.
#pragma once

#include <stdint.h>

namespace df {
namespace DF_ISA {

// y[r * ldy + o] = sum over k of x[r][k] * w[o * ldw + k]. Rows of x are doubles with zeros up to a multiple of eight.
// The order depends on k alone: eight lanes, each summed in order, then halves of the lanes onto each other.
void dots(const double* const* x, int64_t rows, const uint16_t* w, int64_t ldw, int64_t outs, int64_t k, double* y,
          int64_t ldy);
void dots(const double* const* x, int64_t rows, const float* w, int64_t ldw, int64_t outs, int64_t k, double* y,
          int64_t ldy);

// The same with each output's weights somewhere else.
void dots(const double* const* x, int64_t rows, const double* const* w, int64_t outs, int64_t k, double* y,
          int64_t ldy);

// The same with weights as MXFP4: codes [outs, k / 2], scales [outs, k / 32].
struct Fp4 {
  const uint8_t *codes, *scales;
};
void dots(const double* const* x, int64_t rows, Fp4 w, int64_t outs, int64_t k, double* y, int64_t ldy);

// out[r * ldo + c] = sum over j of w[r * ldw + j] * v[j][c], j in order; columns is a multiple of eight.
void mix(const double* w, int64_t ldw, int64_t rows, const double* const* v, int64_t count, int64_t columns,
         double* out, int64_t ldo);

}  // namespace DF_ISA
}  // namespace df
