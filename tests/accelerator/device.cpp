// A device "fake" for tests where there is no GPU: its memory is host memory, and its ops are those of CPUs.
// As on a GPU, an op refuses to combine a tensor of the device with one of the CPU that has a dim. `watch` shows each op.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/result_type.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <functional>
#include <map>
#include <set>
#include <string>

namespace {

constexpr auto FAKE = c10::DeviceType::PrivateUse1;

// The memory of a storage, which is kept.
c10::DataPtr borrowed(const c10::Storage& owner, c10::Device device) {
  auto release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  return {owner.mutable_data(), new c10::Storage(owner), release, device};
}

// Keeps what is freed through it alive until then; allocates on the device by itself for resized storages.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr made = c10::GetCPUAllocator()->allocate(bytes);
    auto* kept = new c10::DataPtr(std::move(made));
    return {kept->get(), kept, [](void* ptr) { delete static_cast<c10::DataPtr*>(ptr); }, c10::Device(FAKE, 0)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
};
Allocator allocator;
REGISTER_ALLOCATOR(FAKE, &allocator);

using Seen = void (*)(const char* op, bool waits, bool runs);
Seen seen = nullptr;

// An op of the host: whether a GPU would let it wait for the device, and whether it starts a kernel or a copy.
void report(const char* op, bool waits, bool runs) {
  if (seen != nullptr) seen(op, waits, runs);
}

// Everything has happened when a call returns, so that streams and events have nothing to do.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return FAKE; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {FAKE, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream getDefaultStream(c10::Device) const override { return getStream(getDevice()); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(getDevice()); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(getDevice()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr grown = allocator.allocate(bytes);
    std::memcpy(grown.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(bytes);
  }
};

at::Tensor tensor_of(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return made;
}

// The tensors of one op on the device, and CPU tensors of the same memory.
class Aliases {
 public:
  at::Tensor on_cpu(const at::Tensor& x) {
    if (!x.defined() || x.device().type() != FAKE) {
      has_cpu_ |= x.defined() && x.dim() > 0;
      return x;
    }
    has_fake_ = true;
    auto* key = x.storage().unsafeGetStorageImpl();
    auto found = storages_.find(key);
    if (found == storages_.end()) {
      auto data = borrowed(x.storage(), c10::Device(c10::kCPU));
      c10::Storage made(c10::Storage::use_byte_size_t{}, x.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true);
      found = storages_.emplace(key, Pair{x.storage(), made, made.data()}).first;
    }
    auto alias = tensor_of(found->second.cpu, x, c10::DispatchKey::CPU);
    tensors_.emplace_back(x, alias);
    return alias;
  }

  bool mixed() const { return has_fake_ && has_cpu_; }
  bool any() const { return has_fake_; }

  at::Tensor on_fake(const at::Tensor& x) {
    if (!x.defined() || x.device().type() != c10::kCPU) return x;
    for (auto& [original, alias] : tensors_) {
      if (alias.is_same(x)) return original;
    }
    for (auto& [_, pair] : storages_) {
      if (pair.cpu.unsafeGetStorageImpl() == x.storage().unsafeGetStorageImpl()) {
        return tensor_of(pair.fake, x, c10::DispatchKey::PrivateUse1);
      }
    }
    auto data = borrowed(x.storage(), c10::Device(FAKE, 0));
    c10::Storage made(c10::Storage::use_byte_size_t{}, x.storage().nbytes(), std::move(data), &allocator, true);
    return tensor_of(made, x, c10::DispatchKey::PrivateUse1);
  }

  // What ops that resize or transpose in place have done to their arguments.
  void write_back() {
    for (auto& [_, pair] : storages_) {
      if (pair.cpu.data() == pair.data && pair.cpu.nbytes() == pair.fake.nbytes()) continue;
      pair.fake.unsafeGetStorageImpl()->set_data_ptr_noswap(borrowed(pair.cpu, c10::Device(FAKE, 0)));
      pair.fake.set_nbytes(pair.cpu.nbytes());
    }
    for (auto& [original, alias] : tensors_) {
      if (original.sizes() == alias.sizes() && original.strides() == alias.strides() &&
          original.storage_offset() == alias.storage_offset())
        continue;
      auto* impl = original.unsafeGetTensorImpl();
      impl->set_storage_offset(alias.storage_offset());
      impl->set_sizes_and_strides(alias.sizes(), alias.strides());
    }
  }

 private:
  struct Pair {
    c10::Storage fake, cpu;
    const void* data;
  };
  std::map<c10::StorageImpl*, Pair> storages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  bool has_fake_ = false, has_cpu_ = false;
};

using Convert = std::function<at::Tensor(const at::Tensor&)>;

c10::IValue converted(const c10::IValue& value, const Convert& convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> all;
    for (const at::Tensor x : value.toTensorList()) all.push_back(convert(x));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (std::optional<at::Tensor> x : value.toOptionalTensorList()) {
      all.push_back(x.has_value() ? std::optional<at::Tensor>(convert(*x)) : std::nullopt);
    }
    return all;
  }
  return value;
}

// Ops that take indices, masks or sources on the CPU for tensors on a GPU.
bool takes_both(const std::string& name) {
  for (const char* op : {"aten::index", "aten::_index_put", "aten::copy_", "aten::set_", "aten::_unsafe_index"}) {
    if (name.rfind(op, 0) == 0 && name.rfind("aten::index_select", 0) != 0) return true;
  }
  return false;
}

// Whether the host of a GPU would wait in an op: for a size or number that only the device has, or for an argument.
bool waits(const std::string& name, const c10::ArrayRef<c10::IValue> arguments, bool mixed) {
  static const std::set<std::string> always = {
      "aten::_local_scalar_dense", "aten::equal",  "aten::nonzero",  "aten::masked_select", "aten::bincount",
      "aten::unique_consecutive",  "aten::_unique", "aten::_unique2", "aten::unique_dim",
  };
  if (mixed || always.count(name) != 0) return true;
  if (name == "aten::repeat_interleave") return arguments.back().isNone();  // the size of its result
  if (name != "aten::index" && name.rfind("aten::_index_put", 0) != 0) return false;
  for (const std::optional<at::Tensor> index : arguments[1].toOptionalTensorList()) {
    if (index.has_value() && index->defined() && (index->dtype() == at::kBool || index->dtype() == at::kByte)) return true;
  }
  return false;
}

// Whether an op does more than to make a view, or memory.
bool runs(const c10::OperatorHandle& op, const std::string& name) {
  for (const auto& result : op.schema().returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return false;
  }
  return name.rfind("aten::empty", 0) != 0 && name != "aten::set_" && name != "aten::resize_" && name != "aten::_reshape_alias";
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Aliases aliases;
  bool made_here = false;
  const auto& name = op.schema().name();
  const auto first = stack->size() - op.schema().arguments().size();
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isDevice()) {
      made_here |= value.toDevice().type() == FAKE;
      value = c10::Device(c10::kCPU);
    } else {
      value = converted(value, [&](const at::Tensor& x) { return aliases.on_cpu(x); });
    }
  }
  TORCH_CHECK(!aliases.mixed() || takes_both(name), name, ": expected all tensors to be on one device, got fake and cpu");
  if (aliases.any() || made_here) {
    const c10::ArrayRef<c10::IValue> arguments(stack->data() + first, stack->size() - first);
    report(name.c_str(), waits(name, arguments, aliases.mixed()), runs(op, name));
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
  aliases.write_back();
  if (!aliases.any() && !made_here) return;
  const auto results = stack->size() - op.schema().returns().size();
  for (size_t i = results; i < stack->size(); ++i) {
    (*stack)[i] = converted((*stack)[i], [&](const at::Tensor& x) { return aliases.on_fake(x); });
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool to_device = to.device().type() == FAKE, both = to_device && from.device().type() == FAKE;
  report(to_device ? "copy" : "copy to the CPU", !both && !non_blocking, true);
  Aliases aliases;
  aliases.on_cpu(to).copy_(aliases.on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  Aliases aliases;
  auto target = aliases.on_cpu(to);
  target.resize_(from.sizes()).copy_(aliases.on_cpu(from));
  aliases.write_back();
  return to;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

// Have `shown` called at each op on the device and at each copy; null: nothing.
extern "C" void watch(Seen shown) { seen = shown; }
