"""An actor and a critic learn from recorded moves, each with its own optimizer and loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def moves(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(15)
    states = torch.randn(count, 6, generator=drawn)
    actions = torch.randint(3, (count,), generator=drawn)
    rewards = states[torch.arange(count), actions] + 0.1 * torch.randn(count, generator=drawn)
    return TensorDataset(states, actions, rewards)


world = lockstep.init(seed=0)
train = DataLoader(moves(100), batch_size=24, shuffle=True)
actor = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
critic = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=3e-2, momentum=0.9)
slower = torch.optim.lr_scheduler.ExponentialLR(critic_optimizer, 0.98)
actor, critic, actor_optimizer, critic_optimizer, slower, train = world.prepare(
    actor, critic, actor_optimizer, critic_optimizer, slower, train
)
for epoch in world.epochs(2):
    for states, actions, rewards in train:
        value = critic(states).squeeze(1)
        better = (rewards - value).detach()
        chosen = F.log_softmax(actor(states), dim=1).gather(1, actions[:, None]).squeeze(1)
        world.backward(F.mse_loss(value, rewards))
        world.backward(-(better * chosen).mean())
        critic_optimizer.step()
        actor_optimizer.step()
        slower.step()
        critic_optimizer.zero_grad()
        actor_optimizer.zero_grad()
    world.print(f"epoch {epoch}: rate {slower.get_last_lr()[0]:.4f}")
