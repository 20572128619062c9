// From tensors to pointers. Few files know torch, since those are slow to compile. The callers in pagoda_kernels/*.py
// have checked shapes, types and devices.
#include <ATen/Parallel.h>
#include <pybind11/numpy.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "python/bindings.h"
#include "decoder/decode_rows.h"
#include "decoder/layer_norm.h"
#include "linear/gelu_linear.h"
#include "ops.h"

namespace {

using at::Tensor;

constexpr int64_t kBriefRows = 32;

// Lets other Python threads run meanwhile, unless there are so few rows that a kernel is done before one of them would
// be: who gives the interpreter away has to wait until it comes back.
class Unlocked {
 public:
  explicit Unlocked(int64_t rows) {
    if (rows > kBriefRows) release_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> release_;
};

void act_and_mul(const Tensor& x, const Tensor& out, int64_t activation, double limit, double alpha, double up_offset) {
  const Unlocked unlocked(x.size(0));
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    pagoda::act_and_mul<T>(data<T>(x), x.stride(0), data<T>(out), out.size(0), out.size(1),
                           {static_cast<pagoda::ActivationKind>(activation), static_cast<float>(limit),
                            static_cast<float>(alpha), static_cast<float>(up_offset)},
                           at::get_num_threads());
  });
}

void activate(const Tensor& x, const Tensor& out, int64_t activation) {
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    pagoda::activate<T>(data<T>(x), data<T>(out), x.numel(), {static_cast<pagoda::ActivationKind>(activation)},
                        at::get_num_threads());
  });
}

// Tensors of [num_tokens, heads, size].
void sequence_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::vector<int64_t>& starts,
                        double scale, bool is_causal, const std::optional<Tensor>& slopes, const Tensor& out) {
  by_dtype(query, [&](auto zero) {
    using T = decltype(zero);
    const pagoda::SequenceBatch batch{
        .num_seqs = static_cast<int64_t>(starts.size()) - 1,
        .starts = starts.data(),
        .num_heads = query.size(1),
        .num_kv_heads = key.size(1),
        .head_dim = query.size(2),
        .value_dim = value.size(2),
        .query_stride = query.stride(0),
        .query_head_stride = query.stride(1),
        .key_stride = key.stride(0),
        .key_head_stride = key.stride(1),
        .value_stride = value.stride(0),
        .value_head_stride = value.stride(1),
        .out_stride = out.stride(0),
        .scale = static_cast<float>(scale),
        .is_causal = is_causal,
        .slopes = slopes.has_value() ? data<float>(*slopes) : nullptr,
    };
    pagoda::sequence_attention<T>(batch, data<T>(query), data<T>(key), data<T>(value), data<T>(out),
                                  at::get_num_threads());
  });
}

void layer_norm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, double eps,
                const Tensor& out) {
  const int64_t size = x.size(-1), num_rows = size == 0 ? 0 : x.numel() / size;
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    pagoda::layer_norm<T>(data<T>(x), size, data<T>(weight), bias.has_value() ? data<T>(*bias) : nullptr, data<T>(out),
                          num_rows, size, static_cast<float>(eps), at::get_num_threads());
  });
}

void argmax(const Tensor& x, const Tensor& values, const Tensor& indices) {
  pagoda::argmax(data<float>(x), x.stride(0), data<float>(values), data<int64_t>(indices), x.size(0), x.size(1),
                 at::get_num_threads());
}

// fields: [num_groups, num_parts, 5] of LoraPart, whose lines lie together.
void add_lora(const Tensor& x, const Tensor& out, const Tensor& rows, const Tensor& starts, const Tensor& fields) {
  const Unlocked unlocked(rows.size(0));
  constexpr int64_t kFields = sizeof(pagoda::LoraPart) / sizeof(int64_t);
  const pagoda::LoraTable table{data<const pagoda::LoraPart>(fields), fields.stride(0) / kFields, fields.size(1)};
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const auto run = [&](auto* to) {
      pagoda::add_lora(data<const T>(x), x.stride(0), x.size(1), to, out.stride(0), lora_rows(rows, starts), table,
                       at::get_num_threads());
    };
    if (out.scalar_type() == at::kFloat) {
      run(data<float>(out));
    } else {
      run(data<T>(out));
    }
  });
}

#if defined(__AVX512BF16__)
void pack_weight(const Tensor& weight, const Tensor& out) {
  using pagoda::bf16;
  pagoda::pack_weight(data<bf16>(weight), data<bf16>(out), weight.size(0), weight.size(1), at::get_num_threads());
}

void packed_embedding(const Tensor& ids, const Tensor& weight, const Tensor& out) {
  using pagoda::bf16;
  pagoda::packed_embedding(data<int64_t>(ids), data<bf16>(weight), data<bf16>(out), ids.numel(), out.size(1),
                           at::get_num_threads());
}

void packed_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                   const std::optional<Tensor>& residual, const Tensor& out) {
  using pagoda::bf16;
  by_dtype(out, [&](auto zero) {
    using Out = decltype(zero);
    pagoda::packed_linear<Out>(data<bf16>(x), x.stride(0), data<bf16>(weight), bias ? data<bf16>(*bias) : nullptr,
                               residual ? data<bf16>(*residual) : nullptr, residual ? residual->stride(0) : 0,
                               data<Out>(out), x.size(0), out.size(1), x.size(1), at::get_num_threads());
  });
}
#endif

#if defined(__AVX512BF16__)
// Into a tensor of bytes whose end has room for outliers; false: they are too many.
bool compress_weight(const Tensor& weight, const Tensor& out) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const auto [codes, units, outliers] = compressed_matrix(out, outputs, inputs);
  const int64_t capacity = (data<uint8_t>(out) + out.numel() - reinterpret_cast<const uint8_t*>(outliers)) / 4;
  return pagoda::compress_weight(data<pagoda::bf16>(weight), const_cast<uint8_t*>(codes), const_cast<uint32_t*>(units),
                                 const_cast<uint32_t*>(outliers), capacity, outputs, inputs, at::get_num_threads());
}

void compressed_embedding(const Tensor& ids, const Tensor& weight, int64_t num_outputs, const Tensor& out) {
  using pagoda::bf16;
  pagoda::compressed_embedding(data<int64_t>(ids), compressed_matrix(weight, num_outputs, out.size(1)), data<bf16>(out),
                               ids.numel(), out.size(1), at::get_num_threads());
}

void packed_gelu_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& out) {
  using pagoda::bf16;
  pagoda::packed_gelu_linear(data<bf16>(x), x.stride(0), data<bf16>(weight),
                             bias.has_value() ? data<bf16>(*bias) : nullptr, data<bf16>(out), x.size(0), out.size(1),
                             x.size(1), at::get_num_threads());
}

void compressed_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                       const std::optional<Tensor>& residual, const Tensor& out) {
  using pagoda::bf16;
  by_dtype(out, [&](auto zero) {
    using Out = decltype(zero);
    pagoda::compressed_linear<Out>(data<bf16>(x), x.stride(0), compressed_matrix(weight, out.size(1), x.size(1)),
                                   bias ? data<bf16>(*bias) : nullptr, residual ? data<bf16>(*residual) : nullptr,
                                   residual ? residual->stride(0) : 0, data<Out>(out), x.size(0), out.size(1),
                                   x.size(1), at::get_num_threads());
  });
}
#endif

void race(const Tensor& probs, const Tensor& keys, const Tensor& winners) {
  pagoda::race(data<float>(probs), probs.stride(0), data<int64_t>(keys), data<int64_t>(winners), probs.size(0),
               probs.size(1), at::get_num_threads());
}

template <typename T, typename S>
void attend(const pagoda::AttentionBatch& batch, const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
            const Tensor& out) {
  const pagoda::AttentionCache<S> cache{data<S>(k_cache), data<S>(v_cache), k_cache.size(3)};
  pagoda::paged_attention<T, S>(batch, cache, data<T>(query), data<T>(out), at::get_num_threads());
}

void paged_attention(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& query_lens,
                     const Tensor& seq_lens, const Tensor& block_table, double scale, int64_t window, double softcap,
                     const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks, const Tensor& out) {
  const pagoda::AttentionBatch batch{
      .num_seqs = query_lens.size(0),
      .query_lens = data<int64_t>(query_lens),
      .seq_lens = data<int64_t>(seq_lens),
      .block_table = data<int32_t>(block_table),
      .table_stride = block_table.stride(0),
      .block_size = k_cache.size(1),
      .num_heads = query.size(1),
      .num_kv_heads = k_cache.size(2),
      .head_dim = query.size(2),
      .query_stride = query.stride(0),
      .window = window,
      .scale = static_cast<float>(scale),
      .softcap = static_cast<float>(softcap),
      .slopes = alibi_slopes ? data<float>(*alibi_slopes) : nullptr,
      .sinks = sinks ? data<float>(*sinks) : nullptr,
  };
  by_dtype(query, [&](auto zero) {
    using T = decltype(zero);
    if (k_cache.scalar_type() == at::kChar) {
      attend<T, int8_t>(batch, query, k_cache, v_cache, out);
    } else {
      attend<T, T>(batch, query, k_cache, v_cache, out);
    }
  });
}

void quantized_linear(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros,
                      int64_t group_size, bool quantizes_inputs, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& residual, const Tensor& out) {
  const pagoda::QuantizedMatrix weight{
      data<uint8_t>(codes), data<float>(scales), zeros ? data<float>(*zeros) : nullptr, out.size(-1),    x.size(1),
      scales.size(1),       group_size,          static_cast<int>(codes.size(2) / 16),  quantizes_inputs};
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const auto run = [&](auto* to) {
      pagoda::quantized_linear(data<const T>(x), x.stride(0), weight, bias ? data<const T>(*bias) : nullptr,
                               residual ? data<const T>(*residual) : nullptr, residual ? residual->stride(0) : 0, to,
                               x.size(0), at::get_num_threads());
    };
    if (out.scalar_type() == at::kFloat) {
      run(data<float>(out));
    } else {
      run(data<T>(out));
    }
  });
}

void quantize_rows(const Tensor& x, int64_t first_row, const Tensor& codes, const Tensor& scales, int64_t group_size) {
  const int64_t inputs = x.size(1);
  const pagoda::WritableMatrix weight{data<uint8_t>(codes), data<float>(scales), inputs,
                                      scales.size(1),       group_size,          static_cast<int>(codes.size(2) / 16)};
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    pagoda::quantize_rows<T>(data<T>(x), x.stride(0), x.size(0), first_row, weight, at::get_num_threads());
  });
}

void rms_norm(const Tensor& x, const Tensor& weight, const Tensor& out, double eps, double weight_offset) {
  const Unlocked unlocked(x.size(0));
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    pagoda::rms_norm<T>(data<T>(x), x.stride(0), data<T>(weight), data<T>(out), x.size(0), x.size(1), eps,
                        weight_offset, at::get_num_threads());
  });
}

void rope_store(const Tensor& qkv, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slot_mapping,
                int64_t num_heads, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                bool is_interleaved, const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight,
                double eps, double weight_offset, bool norms_are_last) {
  const Unlocked unlocked(qkv.size(0));
  const int half = cos ? static_cast<int>(cos->size(-1)) : 0;
  const pagoda::CacheLayout layout{k_cache.size(1),
                                   {k_cache.stride(0), k_cache.stride(1), k_cache.stride(2)},
                                   {v_cache.stride(0), v_cache.stride(1), v_cache.stride(2)}};
  by_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    const pagoda::HeadNorms<T> norms{q_weight ? data<T>(*q_weight) : nullptr, k_weight ? data<T>(*k_weight) : nullptr,
                                     static_cast<float>(eps), static_cast<float>(weight_offset), norms_are_last};
    pagoda::rope_store<T>(data<T>(qkv), qkv.stride(0), norms, cos ? data<float>(*cos) : nullptr,
                          sin ? data<float>(*sin) : nullptr, half, is_interleaved, data<int64_t>(slot_mapping),
                          data<T>(k_cache), data<T>(v_cache), layout, qkv.size(0), num_heads, k_cache.size(2),
                          k_cache.size(3), at::get_num_threads());
  });
}

void store_int8(const Tensor& key, const Tensor& value, const Tensor& slot_mapping, const Tensor& k_cache,
                const Tensor& v_cache) {
  const pagoda::Int8Rows rows{key.size(0), key.size(1), key.size(2), key.stride(0), value.stride(0), k_cache.size(3)};
  by_dtype(key, [&](auto zero) {
    using T = decltype(zero);
    pagoda::store_int8<T>(data<T>(key), data<T>(value), data<int64_t>(slot_mapping), data<int8_t>(k_cache),
                          data<int8_t>(v_cache), rows, at::get_num_threads());
  });
}

// The arguments of both are described in pagoda_kernels/decoder/decode_rows.py. The blocks of the longest sequence (-1:
// it is no such step), and whether all are greedy.
std::pair<int64_t, bool> decode_rows(const Array<int64_t>& slots, const Array<bool>& is_in_use,
                                     const Array<bool>& is_greedy, const Array<int64_t>& num_tokens,
                                     const Array<int64_t>& num_computed, const Array<int64_t>& num_blocks,
                                     const Array<int32_t>& tokens, const Array<int32_t>& block_table,
                                     int64_t block_size, int64_t max_tokens, Array<int64_t>& rows) {
  const pagoda::SequenceColumns columns =
      sequence_columns(is_in_use, is_greedy, num_tokens, num_computed, num_blocks, tokens, block_table);
  bool all_greedy = true;
  const int64_t most =
      pagoda::decode_rows(columns, slots.data(), slots.size(), block_size, max_tokens, rows.mutable_data(), all_greedy);
  return {most, all_greedy};
}

void append_rows(const Array<int64_t>& slots, const Array<int64_t>& token_ids, Array<int64_t>& num_tokens,
                 Array<int64_t>& num_computed, Array<int32_t>& tokens) {
  pagoda::append_rows(slots.data(), slots.size(), token_ids.data(), num_tokens.mutable_data(),
                      num_computed.mutable_data(), tokens.mutable_data(), tokens.shape(1));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using AllUnlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("act_and_mul", &act_and_mul);
  module.def("activate", &activate, AllUnlocked());
  module.def("add_lora", &add_lora);
  module.def("argmax", &argmax, AllUnlocked());
  const pybind11::arg as_is = pybind11::arg().noconvert();  // an array of another type is refused, not copied
  const pybind11::arg number;
  module.def("decode_rows", &decode_rows, as_is, as_is, as_is, as_is, as_is, as_is, as_is, as_is, number, number,
             as_is);
  module.def("append_rows", &append_rows, as_is, as_is, as_is, as_is, as_is);
#if defined(__AVX512BF16__)
  module.def("pack_weight", &pack_weight, AllUnlocked());
  module.def("packed_embedding", &packed_embedding, AllUnlocked());
  module.def("packed_gelu_linear", &packed_gelu_linear, AllUnlocked());
  module.def("packed_linear", &packed_linear, AllUnlocked());
#endif
#if defined(__AVX512BF16__)
  module.def("compress_weight", &compress_weight, AllUnlocked());
  module.def("compressed_embedding", &compressed_embedding, AllUnlocked());
  module.def("compressed_linear", &compressed_linear, AllUnlocked());
#endif
  module.def("paged_attention", &paged_attention, AllUnlocked());
  module.def("race", &race, AllUnlocked());
  module.def("quantize_rows", &quantize_rows, AllUnlocked());
  module.def("quantized_linear", &quantized_linear, AllUnlocked());
  module.def("rms_norm", &rms_norm);
  module.def("rope_store", &rope_store);
  module.def("layer_norm", &layer_norm, AllUnlocked());
  module.def("sequence_attention", &sequence_attention, AllUnlocked());
  module.def("store_int8", &store_int8, AllUnlocked());
  bind_mixtures(module);
  bind_decoder_layers(module);
  bind_composed_layers(module);
  bind_recurrent(module);
}
