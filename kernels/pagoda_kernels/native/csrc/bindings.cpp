// From tensors to pointers. Few files know torch, since those are slow to compile. The callers in pagoda_kernels/*.py have
// checked shapes, types and devices.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <pybind11/numpy.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "bindings.h"
#include "decode_rows.h"
#include "decoder_layers.h"
#include "ops.h"

namespace {

using at::Tensor;

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

// Calls body with a value of the tensor's type, float or pagoda::bf16.
template <typename Body>
void by_dtype(const Tensor& tensor, const Body& body) {
  if (tensor.scalar_type() == at::kFloat) {
    body(float{});
  } else {
    TORCH_CHECK(tensor.scalar_type() == at::kBFloat16, "dtype is ", tensor.scalar_type(), ", must be float32 or bfloat16");
    body(pagoda::bf16{});
  }
}

constexpr int64_t kBriefRows = 32;

// Lets other Python threads run meanwhile, unless there are so few rows that a kernel is done before one of them would be:
// who gives the interpreter away has to wait until it comes back.
class Unlocked {
 public:
  explicit Unlocked(int64_t rows) {
    if (rows > kBriefRows) release_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> release_;
};

void act_and_mul(const Tensor& x, const Tensor& out, int64_t activation) {
  const Unlocked unlocked(x.size(0));
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    pagoda::act_and_mul<T>(data<T>(x), x.stride(0), data<T>(out), out.size(0), out.size(1),
                           static_cast<pagoda::Activation>(activation), at::get_num_threads());
  });
}

void argmax(const Tensor& x, const Tensor& values, const Tensor& indices) {
  pagoda::argmax(data<float>(x), x.stride(0), data<float>(values), data<int64_t>(indices), x.size(0), x.size(1),
                 at::get_num_threads());
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
                               residual ? data<bf16>(*residual) : nullptr, residual ? residual->stride(0) : 0, data<Out>(out),
                               x.size(0), out.size(1), x.size(1), at::get_num_threads());
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
                     const std::optional<Tensor>& alibi_slopes, const Tensor& out) {
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
                      int64_t group_size, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                      const Tensor& out) {
  const pagoda::QuantizedMatrix weight{data<uint8_t>(codes),
                                       data<float>(scales),
                                       zeros ? data<float>(*zeros) : nullptr,
                                       out.size(-1),
                                       x.size(1),
                                       scales.size(1),
                                       group_size,
                                       static_cast<int>(codes.size(2) / 16)};
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

#if defined(__AVX512BF16__)
const pagoda::bf16* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? data<const pagoda::bf16>(*tensor) : nullptr;
}

// A matrix of one layer: packed, or codes with scales. Whoever has it keeps its tensors alive.
pagoda::LinearWeights linear_weights(const Tensor& weight, const std::optional<Tensor>& scales,
                                     const std::optional<Tensor>& zeros, int64_t group_size,
                                     const std::optional<Tensor>& bias, int64_t num_outputs, int64_t num_inputs) {
  pagoda::LinearWeights result{nullptr, {}, pointer(bias), num_outputs, num_inputs};
  if (scales) {
    result.quantized = {data<uint8_t>(weight), data<float>(*scales), zeros ? data<float>(*zeros) : nullptr, num_outputs,
                        num_inputs,            scales->size(1),      group_size, static_cast<int>(weight.size(2) / 16)};
  } else {
    result.packed = data<const pagoda::bf16>(weight);
  }
  return result;
}

// One caller at a time: the scratch memory is kept from call to call.
class DecoderLayers {
 public:
  DecoderLayers(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim)
      : num_heads_(num_heads), num_kv_heads_(num_kv_heads), head_dim_(head_dim) {}

  void add(const Tensor& attention_norm, const Tensor& mlp_norm, double eps, double weight_offset,
           const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double head_eps,
           double head_weight_offset, const std::vector<pagoda::LinearWeights>& linears, int64_t activation, int rotation,
           bool is_interleaved, double scale, double softcap, int64_t window, const Tensor& k_cache, const Tensor& v_cache) {
    using pagoda::bf16;
    TORCH_CHECK(linears.size() == 4, "a layer has 4 matrices, got ", linears.size());
    layers_.push_back({
        .attention_norm = data<const bf16>(attention_norm),
        .mlp_norm = data<const bf16>(mlp_norm),
        .eps = static_cast<float>(eps),
        .weight_offset = static_cast<float>(weight_offset),
        .q_norm = pointer(q_norm),
        .k_norm = pointer(k_norm),
        .head_eps = static_cast<float>(head_eps),
        .head_weight_offset = static_cast<float>(head_weight_offset),
        .qkv = linears[0],
        .output = linears[1],
        .gate_up = linears[2],
        .down = linears[3],
        .activation = static_cast<pagoda::Activation>(activation),
        .rotation = rotation,
        .is_interleaved = is_interleaved,
        .scale = static_cast<float>(scale),
        .softcap = static_cast<float>(softcap),
        .window = window,
        .k_cache = data<bf16>(k_cache),
        .v_cache = data<bf16>(v_cache),
    });
    block_size_ = k_cache.size(1);
  }

  // cos and sin: [max_positions, ..., angles] float32, one pair for each rotation.
  void rotate(const Tensor& cos, const Tensor& sin) { tables_.push_back({cos, sin}); }

  // embedding: [vocab_size, hidden_size] bfloat16, or packed as a weight.
  void ends(const Tensor& embedding, bool is_packed, const Tensor& norm, double eps, double weight_offset,
            const pagoda::LinearWeights& linear) {
    embedding_ = embedding;
    is_packed_ = is_packed;
    head_ = {data<const pagoda::bf16>(norm), static_cast<float>(eps), static_cast<float>(weight_offset), linear};
  }

  void forward(const Tensor& x, const Tensor& query_lens, const Tensor& seq_lens, const Tensor& block_table,
               const Tensor& slot_mapping, const Tensor& positions) {
    using pagoda::bf16;
    pagoda::DecoderBatch batch{};
    batch.num_tokens = x.size(0);
    batch.slot_mapping = data<int64_t>(slot_mapping);
    batch.attention.num_seqs = query_lens.size(0);
    batch.attention.query_lens = data<int64_t>(query_lens);
    batch.attention.seq_lens = data<int64_t>(seq_lens);
    batch.attention.block_table = data<int32_t>(block_table);
    batch.attention.table_stride = block_table.stride(0);
    batch.attention.block_size = block_size_;
    batch.attention.num_heads = num_heads_;
    batch.attention.num_kv_heads = num_kv_heads_;
    batch.attention.head_dim = head_dim_;
    const int64_t token = num_kv_heads_ * head_dim_;
    batch.cache = {block_size_, {block_size_ * token, token, head_dim_}, {block_size_ * token, token, head_dim_}};
    angles_.resize(2 * tables_.size());
    for (size_t i = 0; i < tables_.size(); ++i) {
      const int64_t half = tables_[i].first.size(-1);
      float* angles[2];
      for (int j = 0; j < 2; ++j) {
        angles_[2 * i + j].resize(batch.num_tokens * half);
        angles[j] = angles_[2 * i + j].data();
        pagoda::gather(data<float>(j ? tables_[i].second : tables_[i].first), data<int64_t>(positions), batch.num_tokens,
                       half, angles[j]);
      }
      batch.rotations.push_back({angles[0], angles[1], static_cast<int>(half)});
    }
    bf16* scratch = scratch_of(x, pagoda::decoder_scratch_size(layers_, batch));
    pagoda::decoder_layers(layers_, batch, data<bf16>(x), scratch, at::get_num_threads());
  }

  // `forward` of embedded tokens, and the logits of some rows with the argmax of each.
  void forward_to_logits(const Tensor& input_ids, const Tensor& query_lens, const Tensor& seq_lens, const Tensor& block_table,
                         const Tensor& slot_mapping, const Tensor& positions, const Tensor& rows, const Tensor& logits,
                         const Tensor& values, const Tensor& indices) {
    using pagoda::bf16;
    TORCH_CHECK(head_, "forward_to_logits needs both ends of the model");
    const int64_t num_tokens = input_ids.size(0), size = head_->linear.num_inputs;
    const int64_t* ids = data<int64_t>(input_ids);
    const Tensor x = at::empty({num_tokens, size}, embedding_.options());
    if (is_packed_) {
      pagoda::packed_embedding(ids, data<bf16>(embedding_), data<bf16>(x), num_tokens, size, at::get_num_threads());
    } else {
      pagoda::gather(data<bf16>(embedding_), ids, num_tokens, size, data<bf16>(x));
    }
    forward(x, query_lens, seq_lens, block_table, slot_mapping, positions);
    pagoda::bf16* scratch = scratch_of(x, pagoda::head_scratch_size(*head_, rows.size(0)));
    pagoda::decoder_logits(*head_, data<pagoda::bf16>(x), data<int64_t>(rows), rows.size(0), scratch, data<float>(logits),
                           data<float>(values), data<int64_t>(indices), at::get_num_threads());
  }

 private:
  pagoda::bf16* scratch_of(const Tensor& x, int64_t size) {
    if (!scratch_.defined() || scratch_.numel() < size) {
      scratch_ = Tensor();  // before there is another
      scratch_ = at::empty({size}, x.options());
    }
    return data<pagoda::bf16>(scratch_);
  }

  int64_t num_heads_, num_kv_heads_, head_dim_, block_size_ = 0;
  std::vector<pagoda::DecoderLayer> layers_;
  std::vector<std::pair<Tensor, Tensor>> tables_;
  std::optional<pagoda::DecoderHead> head_;
  Tensor embedding_;
  bool is_packed_ = false;
  std::vector<std::vector<float>> angles_;
  Tensor scratch_;
};
#endif

void rms_norm(const Tensor& x, const Tensor& weight, const Tensor& out, double eps, double weight_offset) {
  const Unlocked unlocked(x.size(0));
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    pagoda::rms_norm<T>(data<T>(x), x.stride(0), data<T>(weight), data<T>(out), x.size(0), x.size(1), eps, weight_offset,
                        at::get_num_threads());
  });
}

void rope_store(const Tensor& qkv, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slot_mapping,
                int64_t num_heads, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                bool is_interleaved, const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight,
                double eps, double weight_offset) {
  const Unlocked unlocked(qkv.size(0));
  const int half = cos ? static_cast<int>(cos->size(-1)) : 0;
  const pagoda::CacheLayout layout{k_cache.size(1),
                                   {k_cache.stride(0), k_cache.stride(1), k_cache.stride(2)},
                                   {v_cache.stride(0), v_cache.stride(1), v_cache.stride(2)}};
  by_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    pagoda::rope_store<T>(data<T>(qkv), qkv.stride(0), q_weight ? data<T>(*q_weight) : nullptr,
                          k_weight ? data<T>(*k_weight) : nullptr, eps, weight_offset, cos ? data<float>(*cos) : nullptr,
                          sin ? data<float>(*sin) : nullptr, half, is_interleaved, data<int64_t>(slot_mapping),
                          data<T>(k_cache), data<T>(v_cache), layout, qkv.size(0), num_heads, k_cache.size(2),
                          k_cache.size(3), at::get_num_threads());
  });
}

void store_int8(const Tensor& key, const Tensor& value, const Tensor& slot_mapping, const Tensor& k_cache,
                const Tensor& v_cache) {
  const pagoda::Int8Rows rows{key.size(0),   key.size(1),     key.size(2),
                              key.stride(0), value.stride(0), k_cache.size(3)};
  by_dtype(key, [&](auto zero) {
    using T = decltype(zero);
    pagoda::store_int8<T>(data<T>(key), data<T>(value), data<int64_t>(slot_mapping), data<int8_t>(k_cache),
                          data<int8_t>(v_cache), rows, at::get_num_threads());
  });
}

// The arguments of both are described in pagoda_kernels/decode_rows.py. The blocks of the longest sequence (-1: it is no
// such step), and whether all are greedy.
std::pair<int64_t, bool> decode_rows(const Array<int64_t>& slots, const Array<bool>& is_in_use, const Array<bool>& is_greedy,
                                     const Array<int64_t>& num_tokens, const Array<int64_t>& num_computed,
                                     const Array<int64_t>& num_blocks, const Array<int32_t>& tokens,
                                     const Array<int32_t>& block_table, int64_t block_size, int64_t max_tokens,
                                     Array<int64_t>& rows) {
  const pagoda::SequenceColumns columns{
      .num_slots = is_in_use.size(),
      .is_in_use = is_in_use.data(),
      .is_greedy = is_greedy.data(),
      .num_tokens = num_tokens.data(),
      .num_computed = num_computed.data(),
      .num_blocks = num_blocks.data(),
      .tokens = tokens.data(),
      .tokens_stride = tokens.shape(1),
      .block_table = block_table.data(),
      .table_stride = block_table.shape(1),
  };
  bool all_greedy = true;
  const int64_t most =
      pagoda::decode_rows(columns, slots.data(), slots.size(), block_size, max_tokens, rows.mutable_data(), all_greedy);
  return {most, all_greedy};
}

void append_rows(const Array<int64_t>& slots, const Array<int64_t>& token_ids, Array<int64_t>& num_tokens,
                 Array<int64_t>& num_computed, Array<int32_t>& tokens) {
  pagoda::append_rows(slots.data(), slots.size(), token_ids.data(), num_tokens.mutable_data(), num_computed.mutable_data(),
                      tokens.mutable_data(), tokens.shape(1));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using AllUnlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("act_and_mul", &act_and_mul);
  module.def("argmax", &argmax, AllUnlocked());
  const pybind11::arg as_is = pybind11::arg().noconvert();  // an array of another type is refused, not copied
  const pybind11::arg number;
  module.def("decode_rows", &decode_rows, as_is, as_is, as_is, as_is, as_is, as_is, as_is, as_is, number, number, as_is);
  module.def("append_rows", &append_rows, as_is, as_is, as_is, as_is, as_is);
#if defined(__AVX512BF16__)
  module.def("pack_weight", &pack_weight, AllUnlocked());
  module.def("packed_embedding", &packed_embedding, AllUnlocked());
  module.def("packed_linear", &packed_linear, AllUnlocked());
  module.def("linear_weights", &linear_weights);
  pybind11::class_<pagoda::LinearWeights>(module, "LinearWeights");
  pybind11::class_<DecoderLayers>(module, "decoder_layers")
      .def(pybind11::init<int64_t, int64_t, int64_t>())
      .def("add", &DecoderLayers::add)
      .def("rotate", &DecoderLayers::rotate)
      .def("ends", &DecoderLayers::ends)
      .def("forward", &DecoderLayers::forward, AllUnlocked())
      .def("forward_to_logits", &DecoderLayers::forward_to_logits, AllUnlocked());
#endif
  module.def("paged_attention", &paged_attention, AllUnlocked());
  module.def("race", &race, AllUnlocked());
  module.def("quantized_linear", &quantized_linear, AllUnlocked());
  module.def("rms_norm", &rms_norm);
  module.def("rope_store", &rope_store);
  module.def("store_int8", &store_int8, AllUnlocked());
  bind_composed_layers(module);
}
