//! The geometry: commits the mesh, and publishes its turned vertices.

use partywall::error::Gone;

use super::{
    objects::Header,
    player::{Pace, TURN},
    *,
};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut player = Player::new(session)?;
    let domain = player.domain();
    let scene = objects::open(&domain, objects::SCENE, None)?;
    let mesh = objects::mesh(&domain, scene.place(), &player.job.source)?;
    let vertices = mesh.tensor("vertices")?;
    let kernels = Kernels::of(&domain, scene.place())?;
    let written = domain.timeline(objects::WRITTEN)?;
    let publisher = scene.publisher()?;
    let first = next_frame(&scene)?;
    player.say(Report::Ready)?;
    player.await_start()?;
    let mut pace = player.job.rate.map(Pace::new);
    let shape = [scene.max_bytes() / (4 * raster::VERTEX as u64), raster::VERTEX as u64];
    let last = if player.job.live { u64::MAX } else { player.job.frames };
    for frame in first..last {
        player.begin();
        let mut loan = publisher.loan(DType::I32, &shape, TIMEOUT)?;
        match &kernels {
            None => mesh::turn(vertices.as_slice()?, frame, loan.as_mut_slice()?),
            Some(kernels) => {
                let turned = loan.device()?.as_slice();
                let vertices = vertices.device()?.as_slice();
                let rotation = mesh::rotation(frame);
                let enqueued = kernels.rasteriser.enqueue_turn(kernels.stream(), vertices, &rotation, turned);
                enqueued.doing("launching a kernel")?;
            }
        }
        player.middle()?;
        player.end();
        if let Some(pace) = &mut pace {
            thread::sleep(pace.due().saturating_duration_since(Instant::now()));
        }
        let may = if player.job.live { !player.is_over()? } else { has_room(&mut player, &written, frame)? };
        if !may {
            break;
        }
        let camera = mesh::CAMERA.map(i32::cast_unsigned).to_vec();
        Header { frame, published: Moment::now(), more: camera }.write(&mut loan)?;
        kernels::publish(kernels.as_ref(), loan)?;
    }
    while !player.is_over()? {
        thread::sleep(TURN / 10);
    }
    player.finish(
        "The mesh turns",
        "The mesh is a kept segment, which renderers read in place and which outlives its maker. The vertices of each \
         frame are one sample, and the camera is its header. The geometry waits for the writer: no more frames are in \
         flight than the topic keeps for the successor of a killed renderer.",
        |step| step.value("vertices", shape[0].to_string()),
    )
}

/// Returns the first frame without a scene: the one after the newest, or one that the GPU of a killed geometry has not
/// finished.
fn next_frame(scene: &Topic) -> Result<u64, Failure> {
    let kept = scene.subscribe(Policy::Block).history(IN_FLIGHT).join()?;
    let mut next = 0;
    while let Some(sample) = kept.try_recv()? {
        let frame = Header::of(&sample, 0)?.frame;
        if objects::valid(sample.wait(TIMEOUT))?.is_none() {
            return Ok(frame);
        }
        next = frame + 1;
    }
    Ok(next)
}

/// Waits until so many frames are written that this one may be published. Returns false if the role must end.
fn has_room(player: &mut Player<'_>, written: &Timeline, frame: u64) -> Result<bool, Failure> {
    let needed = (frame + 1).saturating_sub(IN_FLIGHT.into());
    while needed > 0 && !player.is_over()? {
        match written.wait(needed, TURN) {
            Ok(()) => return Ok(true),
            Err(Error::Timeout { .. }) => {}
            // The writer was killed; its successor continues the timeline.
            Err(Error::Gone(Gone::Timeline { .. })) => {
                if !written.follow()? {
                    thread::sleep(TURN / 20);
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(needed == 0)
}
