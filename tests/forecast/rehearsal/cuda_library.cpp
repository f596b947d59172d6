// SPDX-License-Identifier: Apache-2.0
// What the rehearsal meets of libtorch_cuda.so: a class CUDAHooks that registers itself under its
// name at the default priority, and a device guard. There is no GPU, so both fail when they are used.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at::cuda::detail {

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override { TORCH_CHECK(false, "Found no NVIDIA driver on your system"); }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at::cuda::detail

namespace {

struct CUDAGuardImpl final : c10::impl::DeviceGuardImplInterface {
  [[noreturn]] static void fail() {
    TORCH_CHECK(false, "Found no NVIDIA driver on your system");
  }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { fail(); }
  c10::Device getDevice() const override { fail(); }
  void setDevice(c10::Device) const override { fail(); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { fail(); }
  c10::Stream exchangeStream(c10::Stream) const override { fail(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 0; }
};

C10_REGISTER_GUARD_IMPL(CUDA, CUDAGuardImpl);

}  // namespace
