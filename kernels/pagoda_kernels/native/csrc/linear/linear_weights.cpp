#include "linear/linear_weights.h"

namespace pagoda {

#if defined(__AVX512BF16__)

template <typename Out>
void linear(const LinearWeights& weights, const bf16* x, const bf16* residual, Out* out, int64_t num_rows,
            const Team& team) {
  const int64_t inputs = weights.num_inputs, outputs = weights.num_outputs;
  if (weights.packed) {
    packed_linear<Out>(x, inputs, weights.packed, weights.bias, residual, outputs, out, num_rows, outputs, inputs,
                       team.threads(), team.helpers);
  } else if (weights.compressed.codes) {
    compressed_linear<Out>(x, inputs, weights.compressed, weights.bias, residual, outputs, out, num_rows, outputs,
                           inputs, team.threads(), team.helpers);
  } else {
    quantized_linear<bf16, Out>(x, inputs, weights.quantized, weights.bias, residual, outputs, out, num_rows,
                                team.threads(), team.helpers);
  }
}

template void linear(const LinearWeights&, const bf16*, const bf16*, float*, int64_t, const Team&);
template void linear(const LinearWeights&, const bf16*, const bf16*, bf16*, int64_t, const Team&);

#endif

}  // namespace pagoda
