//! A renderer: draws one tile of each frame.

use super::{objects::Header, *};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut player = Player::new(session)?;
    let domain = player.domain();
    let mesh = objects::committed_mesh(&domain)?;
    let indices = objects::tensor::<u32>(&mesh, "indices")?;
    let colours = objects::tensor::<u32>(&mesh, "colours")?;
    let scenes = objects::scene(&domain)?;
    let publisher = objects::tiles(&domain)?.publisher()?;
    // In `--live` a renderer that is late goes on with the latest scene.
    let policy = if player.job.live { Policy::Latest } else { Policy::Block };
    let scenes = scenes.subscribe(policy).history(IN_FLIGHT).join()?;
    player.ready()?;
    let number = player.job.tile;
    let tile = player.job.tiles()[number as usize];
    let mut raster = Raster::default();
    while let Some(sample) = player.next(&scenes)? {
        let header = Header::of(&sample, 12)?;
        if !player.job.live && header.frame < player.job.unwritten {
            continue;
        }
        player.begin();
        let camera = std::array::from_fn(|word| header.more[word].cast_signed());
        let mut loan = loan(&publisher, tile.size)?;
        let look = player.job.look(number, header.frame);
        let size = player.job.size;
        objects::fill(&mut loan, |pixels| {
            let vertices = objects::elements(&sample)?;
            let scene = Scene { indices: &indices, colours: &colours, vertices: &vertices, camera: &camera };
            raster.draw(&scene, size, tile, look, pixels);
            player.middle()
        })?;
        Header { more: vec![number, std::process::id()], ..header }.write(&mut loan)?;
        loan.rests_on(&sample)?;
        drop(sample);
        objects::publish(loan)?;
        player.end();
    }
    if number > 0 {
        return player.leave();
    }
    player.finish(
        "Scenes into tiles",
        "A renderer reads mesh and vertices in place, and draws into a block of its own. Its arithmetic is that of \
         integers, so that every machine draws the same pixels. The number of the frame is in the fourth byte of each \
         pixel: the writer finds a tile that is torn.",
        |step| step.value("tile", format!("{} x {} pixels", tile.size.width, tile.size.height)),
    )
}

fn loan(publisher: &Publisher, size: Size) -> Result<Loan, Failure> {
    Ok(publisher.loan(DType::U32, &[size.height.into(), size.width.into()], TIMEOUT)?)
}
