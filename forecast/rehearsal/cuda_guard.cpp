// SPDX-License-Identifier: Apache-2.0
// A CUDA device that does nothing: the rehearsal's.
//
// With it torch accepts tensors of device "cuda" that have no memory (FakeTensorMode) in all of
// autograd, whether it was built with CUDA or without. forecast/rehearsal/guard.py compiles it, and
// loads it after torch's libraries and before torch._C, which asks for the hooks once, at its start.
//
// A build with CUDA registers hooks and a guard of its own. A second registration of hooks at equal
// priority ends the process (c10/util/Registry.h), so these have a higher one, and count in
// whichever order the libraries load. Of guards the last one stored counts: `weft_fake_cuda`.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

// torch looks its hooks up by the name CUDAHooks
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

namespace at {

C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks);

}  // namespace at

// Let the guard be this one; return whether torch's hooks are these.
extern "C" bool weft_fake_cuda() {
  static const auto* guard = new Guard;
  const c10::impl::DeviceGuardImplRegistrar last(DeviceType::CUDA, guard);
  return dynamic_cast<const Hooks*>(&at::detail::getCUDAHooks()) != nullptr;
}
