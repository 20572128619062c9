// From tensors to pointers. The only file that knows torch, and so the only one that is slow to compile. The callers in
// pagoda_kernels/*.py have checked shapes, types and devices.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "decoder_layers.h"
#include "ops.h"

namespace {

using at::Tensor;

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

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

  void forward(const Tensor& x, const Tensor& query_lens, const Tensor& seq_lens, const Tensor& block_table,
               const Tensor& slot_mapping, const std::vector<std::pair<Tensor, Tensor>>& rotary) {
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
    for (const auto& [cos, sin] : rotary) {
      batch.rotations.push_back({data<float>(cos), data<float>(sin), static_cast<int>(cos.size(-1))});
    }
    const int64_t size = pagoda::decoder_scratch_size(layers_, batch);
    if (!scratch_.defined() || scratch_.numel() < size) {
      scratch_ = Tensor();  // before there is another
      scratch_ = at::empty({size}, x.options());
    }
    pagoda::decoder_layers(layers_, batch, data<bf16>(x), data<bf16>(scratch_), at::get_num_threads());
  }

 private:
  int64_t num_heads_, num_kv_heads_, head_dim_, block_size_ = 0;
  std::vector<pagoda::DecoderLayer> layers_;
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

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using AllUnlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("act_and_mul", &act_and_mul);
  module.def("argmax", &argmax, AllUnlocked());
#if defined(__AVX512BF16__)
  module.def("pack_weight", &pack_weight, AllUnlocked());
  module.def("packed_embedding", &packed_embedding, AllUnlocked());
  module.def("packed_linear", &packed_linear, AllUnlocked());
  module.def("linear_weights", &linear_weights);
  pybind11::class_<pagoda::LinearWeights>(module, "LinearWeights");
  pybind11::class_<DecoderLayers>(module, "decoder_layers")
      .def(pybind11::init<int64_t, int64_t, int64_t>())
      .def("add", &DecoderLayers::add)
      .def("forward", &DecoderLayers::forward, AllUnlocked());
#endif
  module.def("paged_attention", &paged_attention, AllUnlocked());
  module.def("race", &race, AllUnlocked());
  module.def("quantized_linear", &quantized_linear, AllUnlocked());
  module.def("rms_norm", &rms_norm);
  module.def("rope_store", &rope_store);
  module.def("store_int8", &store_int8, AllUnlocked());
}
