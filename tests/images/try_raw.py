import sys, torch, torch.distributed as dist, numpy as np
import hf_distca
from hf_distca.collator.collation import RankDocuments, DistCACollator
from hf_distca.collator.documents import document_lengths, Columns
from hf_distca.collator.images import DocumentImages, read_images
from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
from hf_distca.models.images import image_model
from tests.images.families import *
from tests.ranks import RankPool
from torch.utils.data import DataLoader

def run(family, counts, ping_pong=False, dtype=torch.float32):
    torch.set_default_dtype(torch.float32)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stock, ours = tiny_model(family,"sdpa"), tiny_model(family,"distca")
    docs = documents(family, counts)
    count = sum(len(d["input_ids"])-1 for d in docs); total=0.
    for d in docs:
        logits = stock(**{k:v for k,v in stock_inputs(stock,d).items() if k!="labels"}).logits
        loss = torch.nn.functional.cross_entropy(logits[0,:-1], torch.tensor(d["input_ids"][1:]), reduction="sum")/count
        loss.backward(); total += loss.item()
    tokens = -(-sum(len(d["input_ids"]) for d in docs)//ranks)
    config = hf_distca.DistCAConfig(tokens_per_rank=tokens, balance_block_size=8, device_profile="cpu", balance_tolerance=0.01, document_layout="fixed", ping_pong=ping_pong)
    dispatcher = hf_distca.make_dispatcher(ours, config, torch.device("cpu"))
    im = image_model(ours)
    columns = Columns(images=im.fields)
    images = DocumentImages.of_parts(im, [read_images(docs, im, columns, "data", (0,1))])
    lengths = document_lengths(docs, columns, False)
    excerpts = fit_documents(lengths, tokens*ranks, "error", "x")
    loader = DataLoader(RankDocuments(docs, lengths, dispatcher.settings, rank, columns, images=images),
        batch_sampler=GlobalBatchSampler(excerpts, capacity=tokens*ranks, shuffle=False), collate_fn=DistCACollator(rank))
    (batch,) = list(loader)
    planned = batch["distca_plan"].images
    batch = dispatcher.prepare(batch)
    loss = ours(**batch, num_items_in_batch=torch.tensor(count)).loss; loss.backward()
    sums = torch.tensor([loss.item()]); dist.all_reduce(sums)
    worst={}
    for (name,p),q in zip(stock.named_parameters(), ours.parameters()):
        if p.grad is None: assert q.grad is None or not q.grad.any(), name; continue
        g = torch.zeros_like(p) if q.grad is None else q.grad.clone(); dist.all_reduce(g)
        worst[name]=((p.grad-g).abs().max()/p.grad.abs().max().clamp(min=1e-6)).item()
    name=max(worst,key=worst.get)
    return (round(total,6), round(sums.item(),6), name, worst[name], {k:(v.encoders.tolist(), len(v.features)) for k,v in planned.items()}, batch["distca_plan"].ran.layers_in_turns)

if __name__=="__main__":
    for size in (1,2,3):
        pool=RankPool(size)
        for family in sys.argv[1:] or CONFIGS:
            for pp in (False, True):
                try: print(size, family, pp, *pool.run(run, family, [2,0,3,1,1], pp)[0], flush=True)
                except AssertionError as e: print(size, family, pp, "\n".join(str(e).splitlines()[-12:]), flush=True); pool.close(); pool=RankPool(size)
        pool.close()
