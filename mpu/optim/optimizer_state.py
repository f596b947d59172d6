# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps from step to step: by name, for checkpoints.

mpu/optim/optimizer.py makes the update; nothing here runs in a step.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from mpu.optim.adam import Adam
from mpu.optim.offload import Offload
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer


class OptimizerState:
    """Masters and moments of the parts of buckets that this rank owns."""

    sink: ParamAndGradBuffer
    offload: Offload | None
    masters: list[Tensor]  # one a bucket
    adams: list[Adam]
    _adam_of: list[Adam]  # one a bucket
    _segment_of: list[list[tuple[int, int, nn.Parameter]]]  # of each bucket: [low, high), segment

    @property
    def steps(self) -> int:
        """Return the number of updates made, without skipped ones. Waits for the device."""
        return self.adams[0].steps

    def loaded(self, steps: int) -> None:
        """Go on from loaded state that `steps` updates have made."""
        for adam in self.adams:
            adam.set_steps(steps)
        if self.offload and self.sink.buckets[0].param_shard.dtype == self.sink.dtype:
            self.offload.masters_from_weights()  # the checkpoint has no masters apart
        self.sink.requantise()

    def named_weights(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """Yield (parameter name, "", first, values) of the sharded weights, as `named_state`."""
        for bucket in self.sink.buckets:
            if bucket.sharded:
                own, first = bucket.param_shard, bucket.low
                for name, low, high, start in bucket.owned():
                    yield name, "", low - start, own[low - first : high - first]

    def named_state(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """Yield (parameter name, kind, first, values) for kind in master, exp_avg, exp_avg_sq.

        values: the owned elements [first, first + n) of the flattened local parameter, as a view:
        writing to it loads the state. There are masters only where weights have another dtype.
        """
        every = zip(self.sink.buckets, self.masters, self._segment_of, self._adam_of, strict=True)
        for bucket, master, segments, adam in every:
            for name, low, high, start in bucket.owned():
                if master.dtype != bucket.param_shard.dtype:
                    yield name, "master", low - start, master[low - bucket.low : high - bucket.low]
                first, segment = next((lo, s) for lo, hi, s in segments if lo <= low and high <= hi)
                moments = zip(("exp_avg", "exp_avg_sq"), adam.moments(segment), strict=True)
                for kind, values in moments:
                    yield name, kind, low - start, values[low - first : high - first]

    def moments(self) -> Iterator[Tensor]:
        """Yield AdamW's moments of every part."""
        for adam, here in zip(self._adam_of, self._segment_of, strict=True):
            yield from (moment for _, _, segment in here for moment in adam.moments(segment))

    def masters_from_weights(self) -> None:
        """Widen the weights into the masters, after the weights alone were loaded."""
        for bucket, master in zip(self.sink.buckets, self.masters, strict=True):
            if master is not bucket.param_shard:
                master.copy_(bucket.param_shard)
        self.sink.requantise()
