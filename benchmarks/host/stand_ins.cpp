// Stand-ins for ATen's CPU kernels: each does what the host side of a GPU's kernel does at least, and computes nothing.
//
// All return tensors of the shapes, dtypes and strides that the CPU kernel returns. Pointwise ones build a TensorIterator,
// as on a GPU: it broadcasts, promotes dtypes and allocates. The others allocate their results.
//
// Functions take exactly the arguments of the schemas in ATen's native_functions.yaml.

#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace {

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;
using at::TensorIterator;
using MaybeTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

Tensor contiguous(IntArrayRef sizes, const Tensor& like, std::optional<at::ScalarType> dtype = std::nullopt) {
  return at::detail::empty_cpu(sizes, like.options().dtype(dtype.value_or(like.scalar_type())));
}

// (B, H, N, d), dense as (B, N, H, d)
Tensor heads(const Tensor& like) {
  return contiguous({like.size(0), like.size(2), like.size(1), like.size(3)}, like).transpose(1, 2);
}

// ---- pointwise ----

Tensor binary(const Tensor& a, const Tensor& b) {
  Tensor out;
  return TensorIterator::binary_op(out, a, b).output();
}

Tensor& binary_in_place(Tensor& a, const Tensor& b) {
  TensorIterator::binary_op(a, a, b);
  return a;
}

Tensor add(const Tensor& a, const Tensor& b, const Scalar&) { return binary(a, b); }
Tensor& add_in_place(Tensor& a, const Tensor& b, const Scalar&) { return binary_in_place(a, b); }
Tensor gelu_backward(const Tensor& gradient, const Tensor& x, c10::string_view) { return binary(gradient, x); }

Tensor gelu(const Tensor& x, c10::string_view) {
  Tensor out;
  return TensorIterator::unary_op(out, x).output();
}

Tensor& copy(Tensor& to, const Tensor& from, bool) {
  at::TensorIteratorConfig().check_all_same_dtype(false).resize_outputs(false).add_output(to).add_const_input(from).build();
  return to;
}

// ---- matmuls ----

Tensor mm(const Tensor& a, const Tensor& b) { return contiguous({a.size(0), b.size(1)}, a); }
Tensor addmm(const Tensor&, const Tensor& a, const Tensor& b, const Scalar&, const Scalar&) { return mm(a, b); }
Tensor bmm(const Tensor& a, const Tensor& b) { return contiguous({a.size(0), a.size(1), b.size(2)}, a); }

// ---- sums over rows, norms, softmax ----

Tensor sum(const Tensor& x, at::OptionalIntArrayRef dims, bool keepdim, std::optional<at::ScalarType> dtype) {
  std::vector<bool> is_summed(x.dim(), !dims || dims->empty());
  if (dims) {
    for (int64_t dim : *dims) is_summed[dim < 0 ? dim + x.dim() : dim] = true;
  }
  Sizes sizes;
  for (int64_t i = 0; i < x.dim(); i++) {
    if (!is_summed[i]) sizes.push_back(x.size(i));
    else if (keepdim) sizes.push_back(1);
  }
  return contiguous(sizes, x, dtype);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(
    const Tensor& x, IntArrayRef normalized, const MaybeTensor& weight, const MaybeTensor&, double) {
  Sizes rows = x.sizes().vec();
  std::fill(rows.end() - normalized.size(), rows.end(), 1);
  auto statistics = weight ? weight->scalar_type() : x.scalar_type();
  return {contiguous(x.sizes(), x), contiguous(rows, x, statistics), contiguous(rows, x, statistics)};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor&, const Tensor& x, IntArrayRef normalized, const Tensor&, const Tensor&, const MaybeTensor& weight,
    const MaybeTensor&, std::array<bool, 3> wanted) {
  auto of = [&](int i, IntArrayRef sizes, const Tensor& like) { return wanted[i] ? contiguous(sizes, like) : Tensor(); };
  const Tensor& parameter = weight ? *weight : x;
  return {of(0, x.sizes(), x), of(1, normalized, parameter), of(2, normalized, parameter)};
}

Tensor softmax(const Tensor& x, int64_t, bool) { return contiguous(x.sizes(), x); }

Tensor softmax_backward(const Tensor& gradient, const Tensor&, int64_t, at::ScalarType dtype) {
  return contiguous(gradient.sizes(), gradient, dtype);
}

// ---- SDPA's flash kernel ----

std::tuple<Tensor, Tensor> attention(
    const Tensor& q, const Tensor&, const Tensor&, double, bool, const MaybeTensor&, std::optional<double>) {
  return {heads(q), contiguous({q.size(0), q.size(2), q.size(1)}, q, at::kFloat).transpose(1, 2)};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&, const Tensor&, double, bool,
    const MaybeTensor&, std::optional<double>) {
  return {heads(q), heads(k), heads(v)};
}

// ---- of whole tensors ----

Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  const Tensor& first = *tensors.begin();
  Sizes sizes = first.sizes().vec();
  int64_t& along = sizes[dim < 0 ? dim + first.dim() : dim];
  along = 0;
  for (const Tensor& t : tensors) along += t.size(dim);
  return contiguous(sizes, first);
}

void register_all(torch::Library& aten) {
  aten.impl("add.Tensor", add);
  aten.impl("add_.Tensor", add_in_place);
  aten.impl("mul.Tensor", binary);
  aten.impl("gelu", gelu);
  aten.impl("gelu_backward", gelu_backward);
  aten.impl("copy_", copy);
  aten.impl("mm", mm);
  aten.impl("addmm", addmm);
  aten.impl("bmm", bmm);
  aten.impl("sum.dim_IntList", sum);
  aten.impl("native_layer_norm", layer_norm);
  aten.impl("native_layer_norm_backward", layer_norm_backward);
  aten.impl("_softmax", softmax);
  aten.impl("_softmax_backward_data", softmax_backward);
  aten.impl("_scaled_dot_product_flash_attention_for_cpu", attention);
  aten.impl("_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward);
  aten.impl("cat", cat);
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Keeps what is freed, by its size, and gives it out again, as a GPU's allocator does. malloc returns large memory to the
// kernel, and the call for it again would take longer than everything else that is measured.
struct Pool : c10::Allocator {
  static constexpr size_t header = 64;  // bytes before the memory, which hold its size
  static std::unordered_map<size_t, std::vector<char*>> free;

  static void keep(void* memory) {
    char* start = static_cast<char*>(memory) - header;
    free[*reinterpret_cast<size_t*>(start)].push_back(start);
  }

  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, keep, at::kCPU};
    auto& fitting = free[size];
    char* start;
    if (fitting.empty()) {
      start = static_cast<char*>(std::aligned_alloc(header, header + (size + header - 1) / header * header));
      *reinterpret_cast<size_t*>(start) = size;
    } else {
      start = fitting.back();
      fitting.pop_back();
    }
    return {start + header, start + header, keep, at::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return keep; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

std::unordered_map<size_t, std::vector<char*>> Pool::free;
Pool pool;
c10::Allocator* before = nullptr;

}  // namespace

// Replace the kernels, and the allocator, until `restore_kernels` is called with what this returns.
extern "C" void* replace_kernels() {
  Silent silent;  // PyTorch warns of every kernel that is replaced
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  register_all(*aten);
  before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&pool, 100);
  return aten;
}

extern "C" void restore_kernels(void* aten) {
  delete static_cast<torch::Library*>(aten);
  c10::SetCPUAllocator(before, 100);
}
